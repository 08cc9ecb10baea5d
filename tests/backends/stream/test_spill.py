"""Blocks' own activations on the disk instead of run again: the same training in every bit."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardlab.errors import UserError
from tests.backends.stream.support import Case, Outcome, running, train, window
from tests.backends.stream.test_invariant import ROWS, VARIANTS
from tests.model.families import llama

CASES = {
    "llama": Case(),
    "bf16": Case(precision="bf16"),
    "dropout, vocabulary by rows": Case(config=lambda: llama(dropout=0.3), rows_elements=ROWS),
    "gemma2": Case("gemma2"),
    "tied": Case("tied llama", accumulation=1),
    "spilled inputs": Case(activation_bytes=0),
    **{name: VARIANTS[name] for name in ("frozen lower half", "frozen tensors in blocks", "frozen embedding")},
}


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert (one.losses, one.norms, one.evaluation) == (other.losses, other.norms, other.evaluation)
    for name, value in other.tensors.items():
        assert torch.equal(one.tensors[name], value), name


@pytest.mark.parametrize("again", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_changes_no_bit(name: str, again: int) -> None:
    case = CASES[name]
    assert_equal(train(replace(case, recompute_blocks=again), steps=3), train(case, steps=3))


def test_what_it_writes_is_read_once_and_the_file_has_no_name(tmp_path: Path) -> None:
    with running(Case(recompute_blocks=2), directory=tmp_path / "stream") as engine:
        spill = engine._spill
        moved = []
        for step in range(3):
            engine.run_window(window(step), 1e-2)
            moved.append(spill.bytes_moved)
            assert not spill._passes
        assert moved[0] > 0
        assert moved == [moved[0], 2 * moved[0], 3 * moved[0]]
        assert not [name for name in os.listdir(tmp_path / "stream") if name.startswith("activations")]
        engine.evaluate(window(9).micro_batches)
        assert spill.bytes_moved == moved[-1], "an evaluation saves nothing"


def test_a_window_that_is_not_finite_leaves_nothing() -> None:
    with running(Case(recompute_blocks=2)) as engine:
        block = engine._on.module.blocks[1]
        hook = block.register_forward_hook(lambda *given: given[-1] * float("nan"))
        assert engine.run_window(window(0), 1e-2).skipped
        hook.remove()
        assert not engine._spill._passes
        assert not engine.run_window(window(1), 1e-2).skipped


def test_a_budget_that_is_too_small_is_said() -> None:
    case = Case(recompute_blocks=1)
    with running(case) as engine:
        engine._spill._shelves._limit = 8192
        with pytest.raises(UserError, match="disk_limit"):
            engine.run_window(window(0), 1e-2)
