"""What DeepSpeed reads and no class of its own lists: top-level keys, sections without a model, the stage of each key.

Held against DeepSpeed itself by a test that records what its config class looks up.
"""

from collections.abc import Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Top-level keys that hold a value.
TOP_LEVEL = _names(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping steps_per_print dump_state disable_python_gc disable_allgather communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown
    use_data_before_expert_parallelism dataloader_drop_last log_level vocabulary_size sequence_parallel_size
    data_parallel_size
    """
)

# Sections that a class of DeepSpeed's describes: (module file, class).
MODELS: dict[tuple[str, ...], tuple[str, str]] = {
    ("zero_optimization",): ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    ("fp16",): ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    ("bf16",): ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    ("bfloat16",): ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    ("tensorboard",): ("monitor/config.py", "TensorBoardConfig"),
    ("wandb",): ("monitor/config.py", "WandbConfig"),
    ("csv_monitor",): ("monitor/config.py", "CSVConfig"),
    ("comet",): ("monitor/config.py", "CometConfig"),
    ("comms_logger",): ("comm/config.py", "CommsLoggerConfig"),
    ("compile",): ("compile/config.py", "CompileConfig"),
    ("hybrid_engine",): ("runtime/config.py", "HybridEngineConfig"),
    ("timers", "throughput"): ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
    ("tensor_parallel",): ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    ("weight_quantization",): ("inference/config.py", "WeightQuantConfig"),
}

# Sections that DeepSpeed reads key by key. None: anything goes (their keys depend on a value, or are the user's own).
SECTIONS: dict[tuple[str, ...], frozenset[str] | None] = {
    path: None if keys is None else _names(keys)
    for path, keys in {
        ("optimizer",): "type params legacy_fusion",
        ("optimizer", "params"): None,
        ("scheduler",): "type params",
        ("scheduler", "params"): None,
        ("torch_autocast",): "enabled dtype lower_precision_safe_modules",
        ("data_types",): "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
        ("checkpoint",): "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization "
        "writer",
        ("checkpoint", "parallel_write"): "pipeline_stage",
        ("checkpoint", "writer"): "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel "
        "io_multiplier",
        ("activation_checkpointing",): "partition_activations number_checkpoints contiguous_memory_optimization "
        "synchronize_checkpoint_boundary profile cpu_checkpointing",
        ("aio",): "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
        ("flops_profiler",): "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        ("autotuning",): "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
        "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
        ("autotuning", "arg_mappings"): None,
        ("autotuning", "model_info"): "profile num_params hidden_size num_layers",
        ("pipeline",): "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
        "use_reentrant",
        ("timers",): "throughput",
        ("data_efficiency",): None,
        ("datastates_ckpt",): None,
        ("expert_parallel",): None,
        ("inference",): None,  # transformers' own
        ("msamp",): None,  # accelerate's own
    }.items()
}

# Blocks that earlier versions had and that are refused now.
REMOVED = {
    "nebula": "Nebula checkpointing",
    "compression_training": "the compression library",
    "amp": "Apex AMP (use fp16 or bf16)",
    "quantize_training": "Mixture-of-Quantization",
    "sparse_gradients": "sparse gradients",
    "eigenvalue": "Mixture-of-Quantization",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic training",
    "graph_harvesting": "graph harvesting",
    "curriculum_learning": "the top-level curriculum (it is data_efficiency.data_sampling.curriculum_learning now)",
    "progressive_layer_drop": "progressive layer dropping",
}
REMOVED_FROM_ZERO = {
    "mics_shard_size": "MiCS",
    "mics_hierarchical_params_gather": "MiCS",
    "zeropp_loco_param": "LoCo",
}

# What other tools call a key of DeepSpeed's.
NAMES_ELSEWHERE = {
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "betas": "optimizer.params.betas",
    "weight_decay": "optimizer.params.weight_decay",
    "max_grad_norm": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "mixed_precision": "bf16.enabled or fp16.enabled",
    "precision": "bf16.enabled or fp16.enabled",
    "dtype": "bf16.enabled or fp16.enabled",
    "gradient_checkpointing": "the model's own gradient_checkpointing_enable()",
    "num_processes": "the launcher's --num_gpus",
}

# Keys of zero_optimization by the stages at which DeepSpeed looks at them; those not listed count at stages 1 to 3.
_ONLY_3 = _names(
    """
    offload_param sub_group_size leaf_module zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint
    override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    cpu_offload_param prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential
    """
)
_BELOW_3 = _names(
    """
    allgather_bucket_size use_multi_rank_bucket_allreduce ignore_unused_parameters round_robin_gradients
    parameter_alignment elastic_checkpoint compute_grad_norm load_from_fp32_weights legacy_stage1
    """
)
_NEVER = frozenset({"allgather_partitions"})


def stages_of(key: str) -> tuple[int, ...]:
    """The ZeRO stages at which this key of zero_optimization does something."""
    if key == "stage":
        return (0, 1, 2, 3)
    if key in _NEVER:
        return ()
    if key in _ONLY_3 or key.startswith("stage3_"):
        return (3,)
    return (1, 2) if key in _BELOW_3 else (1, 2, 3)


def dead_keys(zero: Mapping[str, Any]) -> list[str]:
    """The keys of a zero_optimization section that do nothing at its stage."""
    stage = zero.get("stage", 0)
    return [key for key in zero if stage not in stages_of(key)]
