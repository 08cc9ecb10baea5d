"""What DeepSpeed is told: everything, so that it decides nothing by itself."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from shardlab.backends.zero_config import deepspeed_config
from shardlab.plan import Offload, Plan

SIZES = (1000, 64, 40000)
STAGES = [1, 2, 3]


def config(
    stage: int,
    *,
    clip: float | None = 1.0,
    precision: str = "fp32",
    offload: str = "none",
    sizes: Sequence[int] = SIZES,
) -> dict[str, Any]:
    place = Offload(offload if stage == 3 else "none", offload)
    plan = Plan(f"zero{stage}", 2, 3, 4, 24, precision, clip_grad_norm=clip, offload=place)
    return deepspeed_config(plan, sizes)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_is_always_written(stage: int, clip: float | None) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8068: without the key DeepSpeed clips at 1.0."""
    assert config(stage, clip=clip)["gradient_clipping"] == (clip or 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_batch_sizes_multiply(stage: int) -> None:
    made = config(stage)
    assert made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] * 2 == made["train_batch_size"]


def test_nothing_is_left_to_deepspeed() -> None:
    """https://github.com/huggingface/transformers/issues/21342: a value of "auto" that nobody resolved."""
    for stage, precision, offload in itertools.product(STAGES, ["fp32", "bf16"], ["none", "cpu"]):
        made = config(stage, precision=precision, offload=offload)
        assert "auto" not in json.dumps(made)
        assert made["zero_optimization"]["stage"] == stage
        assert ("bf16" in made) == (precision == "bf16")
        assert ("offload_optimizer" in made["zero_optimization"]) == (offload == "cpu")
        assert ("offload_param" in made["zero_optimization"]) == (offload == "cpu" and stage == 3)


def test_stage_3_keeps_no_more_gathered_than_it_needs() -> None:
    """DeepSpeed's defaults of 1e9 elements keep a small model gathered whole."""
    zero = config(3)["zero_optimization"]
    assert zero["stage3_max_live_parameters"] < 2 * max(SIZES)
    assert zero["stage3_prefetch_bucket_size"] < max(SIZES)
    assert zero["stage3_max_reuse_distance"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_follow_the_model(stage: int) -> None:
    """DeepSpeed allocates them whole: its default of 5e8 elements would be far more than a small model."""
    zero = config(stage)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] <= sum(SIZES) / 8


@pytest.mark.parametrize("elements", [1, 4, 15, 16, 24, 1001 * 8])
@pytest.mark.parametrize("stage", STAGES)
def test_a_bucket_is_of_a_size_that_deepspeed_takes(stage: int, elements: int) -> None:
    """It refuses one of no element, and on stages 1 and 2 an odd number."""
    bucket = config(stage, sizes=[elements])["zero_optimization"]["allgather_bucket_size"]
    assert bucket > 0
    assert bucket % 2 == 0


def test_gradients_are_summed_in_fp32_under_bf16() -> None:
    made = config(2, precision="bf16")
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"
