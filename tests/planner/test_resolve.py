"""Every auto becomes a value, and batch sizes that do not close are refused before any rank starts."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.errors import UserError
from shardlab.planner import describe, resolve
from shardlab.recipe import Recipe


def recipe_of(batch: int = 32, **shard: Any) -> Recipe:
    return Recipe.from_dict({"train": {"global_batch_size": batch}, "shard": shard})


def refusal(recipe: Recipe, world_size: int) -> str:
    with pytest.raises(UserError) as caught:
        resolve(recipe, world_size=world_size)
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "backend"), [(1, "ddp"), (2, "fsdp"), (4, "fsdp")])
def test_auto_shards_where_there_is_something_to_shard_over(world_size: int, backend: str):
    plan = resolve(recipe_of(), world_size=world_size)
    assert plan.backend == backend
    assert any(f"backend auto = {backend}" in reason for reason in plan.reasons)


def test_what_was_chosen_is_kept_and_has_no_reason_to_give():
    plan = resolve(recipe_of(backend="zero3", micro_batch=4), world_size=2)
    assert (plan.backend, plan.micro_batch, plan.accumulation, plan.reasons) == ("zero3", 4, 4, ())


def test_the_batch_is_printed_as_a_product_once():
    """https://github.com/modelscope/ms-swift/issues/9351: the global batch was not what its user thought."""
    lines = describe(resolve(recipe_of(backend="fsdp", micro_batch=4), world_size=2)).splitlines()
    assert lines.count("micro_batch 4 x accumulation 4 x 2 ranks = 32 sequences") == 1
    assert "clip_grad_norm 1" in lines[0]


def test_no_clipping_reaches_the_plan_as_off():
    """https://github.com/deepspeedai/DeepSpeed/pull/8068: without the key DeepSpeed clips at 1.0."""
    plan = resolve(Recipe.from_dict({"train": {"clip_grad_norm": None}}), world_size=1)
    assert plan.clip_grad_norm is None
    assert "clip_grad_norm off" in describe(plan)


@given(batch=st.integers(1, 512), world_size=st.integers(1, 16), micro_batch=st.just("auto") | st.integers(1, 32))
@settings(max_examples=200, deadline=None)
def test_the_batch_closes_or_the_mend_that_is_named_works(batch: int, world_size: int, micro_batch: Any):
    recipe = recipe_of(batch, micro_batch=micro_batch)
    unit = world_size * (1 if micro_batch == "auto" else micro_batch)
    if batch % unit:
        complaint = refusal(recipe, world_size)
        assert str(batch) in complaint
        assert str(unit) in complaint
        named = int(complaint.split("set train.global_batch_size=")[1].split()[0])
        recipe = recipe_of(named, micro_batch=micro_batch)
        if "or shard.micro_batch=auto" in complaint:
            resolve(recipe_of(batch), world_size=world_size)
    plan = resolve(recipe, world_size=world_size)
    assert plan.micro_batch * plan.accumulation * plan.world_size == plan.global_batch_size
    assert plan.global_batch_size == recipe.train.global_batch_size
    assert "auto" not in asdict(plan).values()


@given(share=st.integers(1, 200), world_size=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_an_automatic_micro_batch_is_the_largest_divisor_up_to_eight(share: int, world_size: int):
    chosen = resolve(recipe_of(share * world_size), world_size=world_size).micro_batch
    assert chosen <= 8
    assert share % chosen == 0
    assert not any(share % larger == 0 for larger in range(chosen + 1, 9))


def test_a_batch_that_does_not_close_names_both_numbers():
    """https://github.com/hiyouga/LlamaFactory/issues/201 and https://github.com/CarperAI/trlx/issues/376."""
    complaint = refusal(recipe_of(7, micro_batch=2), 2)
    assert "train.global_batch_size 7 is not a multiple of micro_batch 2 x 2 ranks = 4" in complaint
    assert "set train.global_batch_size=8" in complaint


def test_another_number_of_ranks_than_expected_is_refused():
    """https://github.com/huggingface/accelerate/issues/2298: a changed number of processes changed the batch."""
    complaint = refusal(recipe_of(world_size=4), 2)
    assert "shard.world_size is 4, but this job has 2 ranks" in complaint
    assert "shard.world_size=2" in complaint


@pytest.mark.parametrize(
    ("setting", "value"),
    [("backend", "zero3"), ("backend", "stream"), ("recompute", "selective"), ("offload", {"activations": "disk"})],
)
def test_what_compiled_blocks_have_no_place_for_is_refused(setting: str, value: Any):
    shard = {"backend": "ddp", setting: value}
    recipe = Recipe.from_dict({"train": {"compile": True}, "shard": shard})
    assert "train.compile is not for shard." in refusal(recipe, 1)
    possible = Recipe.from_dict({"train": {"compile": True}, "shard": {"backend": "zero2", "recompute": "full"}})
    assert "blocks compiled" in describe(resolve(possible, world_size=2))


def test_freed_memory_is_kept_where_it_is_asked_for_again():
    assert resolve(recipe_of(backend="ddp", keep_freed=True), world_size=2).keep_freed
    assert "is for backend ddp, not zero3" in refusal(recipe_of(backend="zero3", keep_freed=True), 2)


def test_offload_that_auto_cannot_carry_out_is_refused_at_one_rank_only():
    recipe = recipe_of(offload={"parameters": "cpu", "optimizer": "cpu"})
    assert resolve(recipe, world_size=2).offload.parameters == "cpu"
    assert "which auto is at 1 rank; set shard.backend=fsdp" in refusal(recipe, 1)


def test_small_state_is_for_backend_stream_only():
    small = {"train": {"optimizer": {"moments": "8bit"}}}
    found = resolve(Recipe.from_dict({**small, "shard": {"backend": "stream"}}), world_size=1)
    assert (found.stream.masters, found.stream.moments, found.stream.gradients) == ("fp32", "8bit", "fp32")
    with pytest.raises(UserError, match=r"train.optimizer.moments 8bit is for backend stream, not ddp"):
        resolve(Recipe.from_dict(small), world_size=1)


def test_a_step_is_the_same_global_batch_at_every_world_size():
    """https://github.com/huggingface/accelerate/issues/2142: a schedule ran once per process. Steps count global
    batches, so what a step is may not depend on the ranks."""
    plans = [resolve(recipe_of(32), world_size=world_size) for world_size in (1, 2, 4, 8)]
    assert {plan.global_batch_size for plan in plans} == {32}
