"""The ds_config of a plan, complete: DeepSpeed decides nothing by itself, and nothing in it is "auto"."""

from collections.abc import Sequence
from typing import Any

import torch

from shardlab.plan import Plan

# Parameters below this many elements stay gathered on every rank (norms, biases): gathering one costs more than it
# saves.
PERSISTENCE_THRESHOLD = 10_000
# Gradients are reduced in buckets of at most this many elements (as DDP's 25 MiB in fp32), and in at least eight:
# DeepSpeed allocates buckets whole, however small the model; a larger tensor is sent alone.
BUCKET_ELEMENTS = 6_553_600
FEWEST_BUCKETS = 8


def bucket_elements(total: int) -> int:
    """Elements in a bucket for a model of `total`; DeepSpeed refuses an odd number (stages 1 and 2) and none at all."""
    return max(2, min(BUCKET_ELEMENTS, total // FEWEST_BUCKETS) // 2 * 2)


def deepspeed_config(plan: Plan, sizes: Sequence[int], *, accelerator: bool | None = None) -> dict[str, Any]:
    """A config for `deepspeed.initialize`, also usable with the `deepspeed` command and the HF Trainer.

    `sizes` are the elements of each parameter: limits and buckets follow the model. DeepSpeed's defaults (1e9 live
    parameters, 5e8 in a bucket) would keep a whole small model gathered. `accelerator`: whether it is for a machine
    that has one; None is this machine.
    """
    stage = int(plan.backend[-1])
    if accelerator is None:
        accelerator = torch.accelerator.is_available()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "train_batch_size": plan.global_batch_size,
        # Always there: without the key DeepSpeed clips at 1.0.
        "gradient_clipping": 0.0 if plan.clip_grad_norm is None else plan.clip_grad_norm,
        "zero_optimization": _zero(plan, stage, max(sizes), sum(sizes), accelerator),
        # Our optimizer, not DeepSpeed's: torch's fused AdamW gives the same update on every backend.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        "steps_per_print": 1_000_000_000,
    }
    if plan.precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def _zero(plan: Plan, stage: int, largest: int, total: int, accelerator: bool) -> dict[str, Any]:
    bucket = bucket_elements(total)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    # Pinned memory and streams to overlap on are an accelerator's; on a CPU overlapping only costs a second bucket.
    pinned = overlap = accelerator
    if plan.offload.optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if stage < 3:
        return zero | {"contiguous_gradients": True, "overlap_comm": overlap and stage == 2}
    if plan.offload.parameters == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return zero | {
        "contiguous_gradients": True,
        "overlap_comm": overlap,
        "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
        "stage3_max_live_parameters": largest + bucket,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": bucket,
        # torch's linear saves the gathered weight for its backward pass, and so keeps the whole model.
        "memory_efficient_linear": True,
    }
