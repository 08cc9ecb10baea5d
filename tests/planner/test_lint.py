"""The linter of ds_configs: what DeepSpeed takes without a word, or fails on without a clear one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardlab.planner.lint import Finding, Sizes, hidden_size, lint_ds_config, resolve_auto, sizes_from_config

OF_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def config(**changes: Any) -> dict[str, Any]:
    """A ds_config that nothing is to be said against."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    } | changes


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": stage, **keys})


def errors(values: dict[str, Any], *others: Any, **options: Any) -> list[Finding]:
    return [one for one in lint_ds_config(values, *others, **options) if one.severity == "error"]


def only_error(values: dict[str, Any], *others: Any, **options: Any) -> Finding:
    (error,) = errors(values, *others, **options)
    return error


def warnings_and_errors(values: dict[str, Any], **options: Any) -> list[str]:
    return [one.key for one in lint_ds_config(values, **options) if one.severity != "note"]


def test_a_sound_config_gets_no_more_than_its_batch() -> None:
    (note,) = lint_ds_config(config(), ranks=2)
    assert str(note) == (
        "note: ds_config: train_micro_batch_size_per_gpu: a step is micro-batch 2 x accumulation 1 x 2 ranks = "
        "4 sequences"
    )


@pytest.mark.parametrize(
    ("values", "key", "nearest"),
    [
        (config(gradient_cliping=0.0), "gradient_cliping", "gradient_clipping"),
        (zero(stage3_max_live_params=1), "zero_optimization.stage3_max_live_params", "stage3_max_live_parameters"),
        (zero(offload_param={"devise": "cpu"}), "zero_optimization.offload_param.devise", "device"),
        (config(bf16={"enable": True}), "bf16.enable", "enabled"),
        (config(activation_checkpointing={"partition_activation": 1}), "activation_checkpointing.partition_activation",
         "partition_activations"),
        (config(flops_profiler={"profile_steps": 1}), "flops_profiler.profile_steps", "profile_step"),
        (config(comms_logger={"verbos": True}), "comms_logger.verbos", "verbose"),
        (config(aio={"queue_dept": 8}), "aio.queue_dept", "queue_depth"),
        (config(optimizer={"typ": "AdamW"}), "optimizer.typ", "type"),
        (config(tensorboard={"output": "x"}), "tensorboard.output", "output_path"),
        (config(offload_optimizer={"device": "cpu"}), "offload_optimizer", "zero_optimization.offload_optimizer"),
        (config(stage=3), "stage", "zero_optimization.stage"),
        (config(max_grad_norm=1.0), "max_grad_norm", "gradient_clipping"),
        (config(per_device_train_batch_size=1), "per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    ],
)  # fmt: skip
def test_an_unknown_key_at_any_level_is_an_error_with_the_nearest_known_one(
    values: dict[str, Any], key: str, nearest: str
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1809: a misspelled key, and the job runs with the default.

    https://github.com/deepspeedai/DeepSpeed/issues/774
    """
    error = only_error(values)
    assert error.key == key
    assert error.fix == f"did you mean {nearest}?"


def test_an_unknown_key_that_is_meant_can_be_allowed() -> None:
    assert errors(config(my_experiment={"a": 1}), allow=["my_*"]) == []


def test_a_block_that_deepspeed_no_longer_has_is_named() -> None:
    assert "no longer has" in only_error(config(amp={"enabled": True})).message
    assert "no longer has" in only_error(zero(mics_shard_size=8)).message


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (zero(overlap_comm="yess"), "zero_optimization.overlap_comm"),
        (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size"),
        (zero(reduce_bucket_size="5 MB"), "zero_optimization.reduce_bucket_size"),
        (zero(stage=4), "zero_optimization.stage"),
        (zero(offload_optimizer={"device": "gpu"}), "zero_optimization.offload_optimizer.device"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 2}), "zero_optimization.offload_optimizer.ratio"),
        (zero(offload_param="cpu"), "zero_optimization.offload_param"),
        (config(bf16=True), "bf16"),
        (config(optimizer="AdamW"), "optimizer"),
        (config(gradient_clipping="1.0"), "gradient_clipping"),
        (config(gradient_clipping=-1), "gradient_clipping"),
    ],
)
def test_a_value_of_another_kind_is_an_error(values: dict[str, Any], key: str) -> None:
    assert key in {error.key for error in errors(values)}


def test_numbers_as_json_writes_them_are_right() -> None:
    assert errors(zero(reduce_bucket_size=5e8, stage3_max_live_parameters=1e9, overlap_comm=True)) == []


# The batch triangle. https://github.com/hendrycks/apps/issues/9 , https://github.com/deepspeedai/DeepSpeed/issues/17


def test_batch_sizes_that_do_not_multiply_are_named_with_both_products() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/1116"""
    three = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    at_one = only_error(config(**three), ranks=1)
    assert at_one.message.startswith("7 is not ")
    assert at_one.message.endswith(" = 4")
    assert only_error(config(**three)).message.endswith(" = 4")  # no number of ranks could mend it


def test_a_number_in_quotes_is_named_with_its_type() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/201: "8 vs 8", one of which was a string."""
    error = only_error(config(gradient_accumulation_steps="8"))
    assert 'the string "8"' in error.message
    assert error.fix == "write 8 without quotes"


def test_what_is_not_given_follows_as_in_deepspeed() -> None:
    values = config()
    del values["gradient_accumulation_steps"]
    assert lint_ds_config(values, ranks=2)[-1].message.endswith("2 x accumulation 1 x 2 ranks = 4 sequences")
    values["train_batch_size"] = 16
    assert lint_ds_config(values, ranks=2)[-1].message.endswith("2 x accumulation 4 x 2 ranks = 16 sequences")
    del values["train_micro_batch_size_per_gpu"]
    assert lint_ds_config(values, ranks=2)[-1].message.endswith("8 x accumulation 1 x 2 ranks = 16 sequences")
    assert "not a multiple" in only_error(values, ranks=3).message


def test_without_batch_sizes_it_says_what_to_give() -> None:
    error = only_error({"gradient_clipping": 1.0})
    assert "train_micro_batch_size_per_gpu" in error.fix


@pytest.mark.parametrize("value", [0, -2])
def test_a_micro_batch_below_one_is_blamed_itself(value: int) -> None:
    """Not the product that it spoils. https://github.com/huggingface/accelerate/issues/2298"""
    error = only_error(config(train_micro_batch_size_per_gpu=value, train_batch_size=8), ranks=2)
    assert error.key == "train_micro_batch_size_per_gpu"


# Clipping and precision.


def test_clipping_that_is_not_written_is_a_warning() -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8068: without the key DeepSpeed clips at 1.0."""
    values = config()
    del values["gradient_clipping"]
    (warning,) = [one for one in lint_ds_config(values) if one.severity == "warning"]
    assert "clips the gradient's norm at 1.0" in warning.message
    assert warnings_and_errors(config(gradient_clipping=0.0)) == []


def test_clipping_as_an_optimizer_parameter_is_an_error() -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/1381"""
    values = config(optimizer={"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}})
    assert only_error(values).key == "optimizer.params.max_grad_norm"


def test_two_half_precisions_at_once_are_an_error() -> None:
    """https://github.com/huggingface/transformers/issues/39849"""
    error = only_error(config(fp16={"enabled": True}, bf16={"enabled": True}))
    assert "fp16.enabled and bf16.enabled are both true" in error.message


def test_a_precision_that_is_given_stays_the_only_one() -> None:
    """https://github.com/huggingface/transformers/issues/39849: bf16, a default, was added to an fp16 config."""
    values = config(fp16={"enabled": True})
    assert warnings_and_errors(values) == []
    assert "bf16" not in resolve_auto(values, {"hidden_size": 8})[0]


# Offload. https://github.com/deepspeedai/DeepSpeed/pull/2971


def test_parameters_are_offloaded_at_stage_3_only() -> None:
    """https://github.com/OptimalScale/LMFlow/issues/470"""
    error = only_error(zero(2, offload_param={"device": "cpu"}))
    assert error.key == "zero_optimization.offload_param.device"
    assert "the stage is 2" in error.message
    assert errors(zero(2, offload_param={"device": "none"})) == []


def test_nvme_needs_a_path_that_can_be_written_to(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5124"""

    def error(**keys: Any) -> str:
        return str(only_error(zero(offload_param={"device": "nvme", **keys})))

    assert "zero_optimization.offload_param.nvme_path: device is nvme, and there is no path" in error()
    assert "does not exist" in error(nvme_path=str(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert "is not a directory" in error(nvme_path=str(tmp_path / "file"))
    assert errors(zero(offload_param={"device": "nvme", "nvme_path": str(tmp_path)})) == []
    assert errors(zero(offload_param={"device": "nvme", "nvme_path": "."}), root=tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a directory without write permission")
def test_nvme_path_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    error = only_error(zero(offload_param={"device": "nvme", "nvme_path": str(tmp_path)}))
    assert "can't be written to" in error.message


def test_nvme_disk_that_is_too_small_for_the_model(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/Megatron-DeepSpeed/issues/298"""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 1e12}
    values = zero(offload_param=nvme, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)})
    values["zero_force_ds_cpu_optimizer"] = False
    error = only_error(values, sizes=Sizes(10**15, 10**9))
    assert error.key == "zero_optimization.*.nvme_path"
    assert "GiB free" in error.message


def test_nvme_buffer_below_the_largest_tensor(tmp_path: Path) -> None:
    values = zero(offload_param={"device": "nvme", "nvme_path": str(tmp_path)})
    error = only_error(values, sizes=Sizes(2 * 10**8, 131_072_000))
    assert error.key == "zero_optimization.offload_param.buffer_size"
    assert "131072000" in error.fix


def test_nvme_below_stage_3_is_host_memory_in_silence(tmp_path: Path) -> None:
    values = zero(2, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)})
    values["zero_force_ds_cpu_optimizer"] = False
    assert "stage 2 keeps the optimizer in host memory" in only_error(values).message


@pytest.mark.parametrize(
    ("optimizer", "severity"),
    [
        ({"type": "AdamW"}, None),
        ({"type": "Lamb"}, "error"),
        ({"type": "SGD"}, "warning"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "warning"),
        (None, "warning"),
    ],
)
def test_an_optimizer_that_can_not_follow_its_state_to_the_cpu(optimizer: Any, severity: str | None) -> None:
    values = zero(2, offload_optimizer={"device": "cpu"})
    if optimizer is not None:
        values["optimizer"] = optimizer
    said = [one.severity for one in lint_ds_config(values) if "optimizer" in one.key and one.severity != "note"]
    assert said == ([severity] if severity else [])


def test_a_scripts_own_optimizer_may_step_on_the_cpu() -> None:
    values = zero(2, offload_optimizer={"device": "cpu"}) | {"zero_force_ds_cpu_optimizer": False}
    assert warnings_and_errors(values) == []


# Keys that do nothing.


@pytest.mark.parametrize(
    ("stage", "key", "severity"),
    [
        (2, "stage3_max_live_parameters", "warning"),
        (1, "sub_group_size", "warning"),
        (3, "allgather_bucket_size", "note"),
        (2, "allgather_partitions", "note"),
        (0, "overlap_comm", "note"),
    ],
)
def test_a_key_that_is_dead_at_the_stage(stage: int, key: str, severity: str) -> None:
    found = [one for one in lint_ds_config(zero(stage, **{key: 1000})) if one.key.endswith(key)]
    assert [one.severity for one in found if "does nothing" in one.message] == [severity]


# auto. https://github.com/huggingface/transformers/issues/21342


@pytest.mark.parametrize(
    ("model", "width"),
    [
        ({"hidden_size": 32}, 32),
        ({"hidden_sizes": [16, 48]}, 48),
        ({"text_config": {"hidden_size": 64}}, 64),
        ({"text_config": {"hidden_sizes": [8, 24]}}, 24),
        ({"decoder": {"d_model": 40}}, 40),
        ({"d_model": 56}, 56),
        ({"n_embd": 72}, 72),
        ({}, None),
    ],
)
def test_auto_becomes_what_follows_from_the_width(model: dict[str, Any], width: int | None) -> None:
    """https://github.com/huggingface/transformers/issues/22176, https://github.com/syncdoth/RetNet/issues/23 and

    https://github.com/huggingface/transformers/pull/33829: models that keep their width elsewhere.
    """
    values = zero(**dict.fromkeys(OF_WIDTH, "auto"))
    assert hidden_size(model) == width
    resolved, left = resolve_auto(values, model)
    if width is None:
        error = only_error(values, model_config=model)
        assert all(key in error.key for key in OF_WIDTH)
        assert left == [("zero_optimization", key) for key in OF_WIDTH]
        return
    expected = [width * width, int(0.9 * width * width), 10 * width]
    assert [resolved["zero_optimization"][key] for key in OF_WIDTH] == expected
    assert left == []
    assert "auto" not in json.dumps(resolved)
    notes = [one.message for one in lint_ds_config(values, None, model)]
    assert all(any(f"auto becomes {number} " in note for note in notes) for number in expected)


def test_auto_of_a_stage_3_key_goes_where_the_stage_is_2() -> None:
    resolved, left = resolve_auto(zero(2, **dict.fromkeys(OF_WIDTH, "auto")), {"hidden_size": 8})
    assert resolved["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 64}
    assert left == []


def test_auto_that_nothing_fills_in_is_an_error() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/4754: DeepSpeed takes its default, or the word itself."""
    assert "takes its default, 1000000000, in silence" in only_error(zero(sub_group_size="auto")).message
    assert "the word itself" in only_error(config(steps_per_print="auto")).message
    assert errors(config(data_types={"keep_in_fp32_modules": "auto"})) == []  # a word of DeepSpeed's own


def test_auto_from_arguments_names_who_fills_it_in() -> None:
    (note,) = [one for one in lint_ds_config(config(gradient_clipping="auto")) if "auto" in one.message]
    assert note.severity == "note"
    assert "max_grad_norm" in note.message
    assert "the deepspeed command does not" in note.fix


# Sizes.


def test_sizes_of_a_llama_are_those_of_the_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2)  # fmt: skip
    counts = [parameter.numel() for parameter in LlamaForCausalLM(shape).parameters()]
    assert sizes_from_config(shape.to_dict()) == Sizes(sum(counts), max(counts))


def test_it_needs_no_heavy_library() -> None:
    code = (
        "import sys; from shardlab.planner.lint import lint_ds_config as lint; lint({'fp16': {}}); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "deepspeed", "accelerate", "transformers"}.isdisjoint(loaded)
