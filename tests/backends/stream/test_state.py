"""Training state from ddp to stream and back: values, moments, and the next steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardlab.backends.base import Backend
from shardlab.errors import UserError
from shardlab.model.lora import inject
from shardlab.recipe import SGD, AdamW, LoraSection, ParameterGroup
from shardlab.state.fragment import BUFFER, FROZEN, MASTER
from tests.backends.stream.support import Case, running, whole, window
from tests.distributed.reader import Assembled, Piece

PAIRS = [("ddp", "stream"), ("stream", "ddp"), ("stream", "stream")]
GROUPS = (ParameterGroup(pattern="model.layers.1.*", lr=2e-3, weight_decay=0.0),)


def buffered(model: nn.Module) -> nn.Module:
    """With a persistent buffer, and a weight that is not contiguous."""
    model.model.layers[1].register_buffer("scale", torch.randn(3, 2))
    return model


def adapted(model: nn.Module) -> nn.Module:
    return inject(model, LoraSection(rank=2, alpha=4, targets=["q_proj", "up_proj"]))


CASES = {
    "adamw": (Case("tied llama", adapt=buffered, optimizer=AdamW(lr=1e-2, groups=GROUPS)), 3),
    "by rows": (Case("llama", rows_elements=300), 3),
    "bf16": (Case("llama", precision="bf16", freeze=lambda name: "q_proj" in name or "norm" in name), 3),
    "frozen": (Case("llama", freeze=lambda name: "q_proj" in name or "embed" in name, rows_elements=512), 3),
    "adapters": (Case("llama", adapt=adapted), 3),
    "before the first update": (Case("llama"), 0),
    "momentum": (Case("llama", optimizer=SGD(name="sgd", momentum=0.9, lr=0.1)), 3),
    "without optimizer state": (Case("llama", optimizer=SGD(name="sgd", lr=0.1)), 3),
}


def taken(engine: Backend) -> Assembled:
    pieces = [Piece.of(fragment) for fragment in engine.fragments()]
    assert [p.box for p in pieces] == [f.box for f in engine.fragments()], "the same each time"
    return Assembled.of(pieces, engine.optimizer_state())


def steps(engine: Backend, first: int, case: Case) -> list[float]:
    applied = [engine.run_window(window(step, case.accumulation), 1e-2) for step in range(first, first + 3)]
    return [one.loss_sum / one.tokens for one in applied]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("name", CASES)
def test_from_one_to_the_other(name: str, source: str, target: str) -> None:
    case, updates = CASES[name]
    case = replace(case, accumulation=2)
    with running(case, source) as engine:
        for step in range(updates):
            engine.run_window(window(step, case.accumulation), 1e-2)
        saved, weights = taken(engine), whole(engine)
        losses = steps(engine, updates, case)
    with running(replace(case, seed=1), target) as engine:
        assert any(not torch.equal(value, weights[key]) for key, value in whole(engine).items())
        engine.load(saved)
        loaded = taken(engine)
        assert all(torch.equal(value, weights[key]) for key, value in whole(engine).items())
        assert steps(engine, updates, case) == pytest.approx(losses, rel=1e-5)
    assert_same_state(loaded, saved)
    kinds = {kind for _, kind in saved.tensors}
    assert (FROZEN in kinds) is (name in ("bf16", "frozen", "adapters"))
    assert (BUFFER in kinds) is (name == "adamw")
    assert kinds >= {MASTER}


def assert_same_state(one: Assembled, other: Assembled) -> None:
    """Every tensor of every kind in every bit, and the optimizer's numbers and groups by name."""
    assert one.tensors.keys() == other.tensors.keys()
    assert [key for key, value in one.tensors.items() if not np.array_equal(value, other.tensors[key])] == []
    assert one.dtypes == other.dtypes
    assert (one.optimizer.kinds, one.optimizer.scalars) == (other.optimizer.kinds, other.optimizer.scalars)
    groups = [[group["names"] for group in state.optimizer.groups] for state in (one, other)]
    assert groups[0] == groups[1]


def test_a_tensor_that_was_frozen_starts_anew() -> None:
    """Its moments and step count are of its own updates; the others go on with theirs."""
    frozen = Case("llama", freeze=lambda name: "q_proj" in name, accumulation=2)
    free = replace(frozen, freeze=lambda name: False)
    with running(frozen, "ddp") as engine:
        engine.run_window(window(0, 2), 1e-2)
        saved = taken(engine)
    states: dict[str, Any] = {}
    for backend in ("ddp", "stream"):
        with running(free, backend) as engine:
            engine.load(saved)
            losses = steps(engine, 1, free)
            states[backend] = losses, taken(engine).optimizer.scalars
    assert states["stream"][0] == pytest.approx(states["ddp"][0], rel=1e-5)
    assert states["stream"][1] == states["ddp"][1]
    assert {number["step"] for number in states["stream"][1].values()} == {3.0, 4.0}


def test_the_state_of_another_optimizer_is_refused() -> None:
    with running(Case("llama", optimizer=SGD(name="sgd", momentum=0.9)), "ddp") as engine:
        engine.run_window(window(0), 1e-2)
        saved = taken(engine)
    with running(Case("llama")) as engine, pytest.raises(UserError, match=r"keeps momentum_buffer of .* AdamW exp_avg"):
        engine.load(saved)


def test_what_waits_is_applied_before_anything_is_taken(tmp_path: Path) -> None:
    with running(Case("llama"), directory=tmp_path / "state") as engine:
        before = whole(engine)
        engine.run_window(window(0), 1e-2)
        assert engine._store.has_pending(engine._on.layout.blocks[0])
        state = taken(engine)
        assert not engine._store.has_pending(engine._on.layout.blocks[0])
        for key, value in whole(engine).items():
            assert not torch.equal(value, before[key])
            assert torch.equal(value, torch.as_tensor(state.tensors[key, MASTER]))
