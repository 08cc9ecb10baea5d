"""Faults that people reported of other tools; each test names where."""

from dataclasses import replace

import numpy as np
import pytest

from tests.distributed.compare import (
    BACKENDS,
    SHARDING,
    assert_bit_equal,
    assert_close,
    assert_tensors_agree,
    changes,
    in_one_process,
)
from tests.distributed.conftest import Run
from tests.distributed.jobs import Case
from tests.distributed.pool import Pools

pytestmark = pytest.mark.slow

ADAMW = Case(optimizer="adamw", steps=1, lr=1e-2, micro=4)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_short_sequence_alone_on_a_rank_counts_by_its_tokens(run: Run, backend: str, world: int) -> None:
    """https://github.com/huggingface/transformers/pull/40610: each rank divided by its own number of tokens."""
    case = Case(backend, data="ragged", micro=4 // world)
    result, reference = run(case, world)[0], run(Case(data="ragged", micro=1))[0]
    np.testing.assert_allclose(result.losses, reference.losses, rtol=0, atol=1e-6)
    for name, value in reference.after.items():
        np.testing.assert_allclose(result.after[name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_the_loss_does_not_depend_on_the_accumulation(run: Run, micro: int) -> None:
    """https://github.com/huggingface/transformers/pull/34191: accumulation averaged averages of unlike token counts."""
    case = Case(data="odd rows masked", micro=micro, steps=4)
    assert_close(run(case)[0].losses, run(replace(case, micro=1))[0].losses, 1e-5)


@pytest.mark.parametrize("model", ["llama", "tied llama"])
def test_the_gradient_norm_is_one_thing_on_every_backend(run: Run, model: str) -> None:
    """https://github.com/pytorch/torchtitan/issues/2318: a factor of the world size, or a local norm, between backends.

    The model has matrices of 5 rows, which two ranks can't share evenly.
    """
    case = Case(model=model, steps=1, lr=100.0, clip=None)
    norms = [run(replace(case, backend=backend), 2)[0].norms[0] for backend in BACKENDS]
    assert max(norms) / min(norms) - 1 < 1e-5
    assert_close(norms, [run(case)[0].norms[0]] * len(norms), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_the_optimizer_does_not_move_is_reported(run: Run, backend: str) -> None:
    """https://github.com/huggingface/accelerate/issues/3209: an optimizer of stale tensors trained nothing."""
    name = "model.layers.0.mlp.up_proj.weight"
    assert run(replace(ADAMW, backend=backend), 2)[0].unchanged == []
    for outcome in run(replace(ADAMW, backend=backend, idle=name), 2):
        assert outcome.unchanged == [name]


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_an_optimizer_that_holds_a_copy_of_a_tensor_is_found_out(run: Run, backend: str) -> None:
    """https://github.com/pytorch/pytorch/issues/149205: the optimizer was built before the model was sharded."""
    name = "model.layers.0.mlp.up_proj.weight"
    for outcome in run(replace(ADAMW, backend=backend, forgotten=name), 2):
        assert outcome.unchanged == [name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_tensor_is_not_reported(run: Run, backend: str) -> None:
    assert run(replace(ADAMW, backend=backend, freeze=("lm_head.weight",)), 2)[0].unchanged == []


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero2", "zero3"])
def test_each_evaluation_row_is_counted_once(pools: Pools, backend: str, world: int) -> None:
    """https://github.com/huggingface/accelerate/issues/226: the first rows came again, or the last were cut off."""
    for outcome in pools.run(world, "tests.distributed.linear_jobs", "evaluate", case=Case(backend, micro=2), count=5):
        assert outcome == (10.0, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tied_embedding_has_the_gradient_of_both_its_uses(run: Run, backend: str) -> None:
    """https://github.com/huggingface/accelerate/issues/3870: the gradient came from one side only.

    FSDP2 refuses a pair that falls into two of its groups, so it stays in the root's.
    """
    case = Case(model="tied llama", steps=1, lr=100.0, clip=None)
    result, reference = run(replace(case, backend=backend), 2)[0], run(case)[0]
    assert "lm_head.weight" not in result.after
    moved, expected = changes(result.before, result.after), changes(reference.before, reference.after)
    assert_tensors_agree(moved, expected, tolerance=1e-5)
    scale = np.abs(expected["model.embed_tokens.weight"]).max()
    np.testing.assert_allclose(
        moved["model.embed_tokens.weight"], expected["model.embed_tokens.weight"], rtol=0, atol=1e-6 * scale
    )


@pytest.mark.parametrize("backend", SHARDING)
@pytest.mark.parametrize("model", ["llama", "tied llama", "gpt2"])
def test_the_tensors_of_a_sharded_model_are_whole(run: Run, backend: str, model: str) -> None:
    """https://github.com/huggingface/transformers/issues/20082: partitioned tensors were saved empty."""
    case = Case(backend, model=model, steps=1, lr=100.0, clip=None)
    result, reference = run(case, 2)[0], run(in_one_process(case))[0]
    shapes = {name: value.shape for name, value in reference.after.items()}
    assert {name: value.shape for name, value in result.after.items()} == shapes
    assert all(value.size for value in result.after.values())


FROZEN_EMBEDDING = {
    "llama": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "custom": "tokens.weight",
}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", FROZEN_EMBEDDING)
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero2", "zero3"])
def test_recompute_above_a_frozen_embedding_changes_no_bit(run: Run, backend: str, model: str, recompute: str) -> None:
    """https://github.com/huggingface/transformers/issues/21381: with checkpointing gradients were None.

    And https://github.com/Lightning-AI/pytorch-lightning/issues/19267: another dropout mask in the recomputed pass.
    """
    embedding = FROZEN_EMBEDDING[model]
    case = Case(backend, model=model, steps=1, lr=100.0, clip=None, micro=2, dropout=0.3, freeze=(embedding,))
    without, result = run(case, 2)[0], run(replace(case, recompute=recompute), 2)[0]
    assert_bit_equal(result.after, without.after)
    assert (result.losses, result.norms) == (without.losses, without.norms)
    unmoved = [name for name, value in result.after.items() if np.array_equal(value, result.before[name])]
    assert unmoved == [embedding]


@pytest.mark.parametrize("activations", ["none", "disk"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero2", "zero3"])
def test_some_blocks_run_again_change_no_bit(run: Run, backend: str, activations: str) -> None:
    """What `recompute: auto` comes to, with another dropout mask for who draws it in the recomputed pass."""
    case = Case(backend, steps=2, micro=2, dropout=0.3)
    some = replace(case, recompute="full", recompute_blocks=2, activations=activations)
    without, outcomes = run(case, 2)[0], run(some, 2)
    assert_bit_equal(outcomes[0].after, without.after)
    assert (outcomes[0].losses, outcomes[0].norms) == (without.losses, without.norms)
    for outcome in outcomes:
        assert outcome.held_after_steps == [outcome.local_elements] * 2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", ["llama", "tied llama", "gpt2"])
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_nothing_stays_gathered_after_a_step(run: Run, backend: str, model: str, recompute: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8148: a recompute that is cut short leaves modules gathered.

    Whoever leaves a module by an exception does not come to the hook that gives its parameters back.
    """
    case = Case(backend, model=model, micro=2, steps=2, dropout=0.3, recompute=recompute)
    for outcome in run(case, 2):
        assert outcome.held_after_steps == [outcome.local_elements] * 2


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_recompute_gathers_no_more_of_a_model_at_once(pools: Pools, model: str) -> None:
    """A module that is left without its hook would stay gathered beside the next one."""
    none, *others = (
        pools.run(
            2, "tests.distributed.gathered_jobs", "steps", case=Case("zero3", model=model, micro=2, recompute=how)
        )
        for how in ("none", "selective", "full")
    )
    for ranks in others:
        for rank, alone in zip(ranks, none, strict=True):
            assert max(most for most, _ in rank) <= max(most for most, _ in alone)
            assert len({running for _, running in rank}) == 1, "a list that grows with each step"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", ["llama", "tied llama"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "zero3"])
def test_activations_on_the_disk_change_no_bit(run: Run, backend: str, model: str, recompute: str) -> None:
    """Weights that are gathered anew for the backward pass are not among what is saved."""
    case = Case(backend, model=model, steps=2, micro=2, dropout=0.3, recompute=recompute)
    without, outcomes = run(case, 2)[0], run(replace(case, activations="disk"), 2)
    assert_bit_equal(outcomes[0].after, without.after)
    assert (outcomes[0].losses, outcomes[0].norms) == (without.losses, without.norms)
    for outcome in outcomes:
        assert outcome.held_after_steps == [outcome.local_elements] * 2
