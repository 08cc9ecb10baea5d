"""Jobs that take the training state out of a backend, and jobs that put it into another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.backends.base import Backend, OptimizerSettings
from shardlab.backends.zero import ZeROBackend
from shardlab.errors import UserError
from shardlab.model.deferred import ModuleWeights
from shardlab.model.lora import inject
from shardlab.recipe import SGD, AdamW, LoraSection, ParameterGroup
from shardlab.state.fragment import OptimizerState
from shardlab.topology import Topology
from tests.distributed.batches import window
from tests.distributed.jobs import Arrays, Case, make_plan, prepared, whole
from tests.distributed.models import llama
from tests.distributed.reader import Assembled, Piece

SEQUENCES = 12
FROZEN = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight")


@dataclass(frozen=True)
class StateCase:
    """One job on one backend; what it trains is the same everywhere."""

    backend: str
    precision: str = "fp32"
    optimizer: str = "adamw"
    offload: str = "none"
    replicas: int = 1
    lora: bool = False
    freeze: tuple[str, ...] = FROZEN
    threshold: int = 0  # ZeRO-3 keeps smaller parameters gathered
    updates: int = 3  # before the state is taken


@dataclass
class Outcome:
    """What a rank holds, and how it goes on from there. `weights` are those that compute."""

    pieces: list[Piece]
    optimizer: OptimizerState
    losses: list[float]
    weights: Arrays
    collectives: int
    unchanged: list[str]
    elements_read: int = 0


def save(case: StateCase) -> Outcome:
    """Train, take the state, and train on."""
    with _running(case, seed=0) as (engine, topology):
        for step in range(case.updates):
            _step(engine, case, step, topology)
        return _outcome(engine, case, topology)


def load(case: StateCase, state: Assembled) -> Outcome:
    """Put `state` into a model of other values, take it out again, and train on."""
    with _running(case, seed=1) as (engine, topology):
        engine.load(state)
        return replace(_outcome(engine, case, topology), elements_read=state.elements_read)


def load_and_publish(case: StateCase, state: Assembled) -> tuple[Arrays, Arrays, int]:
    """ZeRO's weights after `load`; the same made by a gather of all ranks' masters; collectives in `load`."""
    with _running(case, seed=1) as (engine, _):
        assert isinstance(engine, ZeROBackend)
        with Collectives() as counter:
            engine.load(state)
        loaded = whole(engine)
        engine._state.publish()
        return loaded, whole(engine), counter.count


def refuse(case: StateCase, states: dict[str, Assembled]) -> dict[str, str]:
    """What a user is told of each of `states`, none of which can be loaded."""
    messages = {}
    with _running(case, seed=1) as (engine, _):
        for name, state in states.items():
            try:
                engine.load(state)
            except UserError as error:
                messages[name] = str(error)
    return messages


def _outcome(engine: Backend, case: StateCase, topology: Topology) -> Outcome:
    with Collectives() as counter:
        pieces = [Piece.of(fragment) for fragment in engine.fragments()]
        optimizer = engine.optimizer_state()
    weights = whole(engine)
    losses = [_step(engine, case, case.updates + i, topology) for i in range(3)]
    return Outcome(pieces, optimizer, losses, weights, counter.count, engine.unchanged_parameters())


def _step(engine: Backend, case: StateCase, step: int, topology: Topology) -> float:
    micro = SEQUENCES // topology.world_size
    applied = engine.run_window(window("dozen", step, micro, topology.rank, topology.world_size), 1e-2)
    assert not applied.skipped
    return applied.loss_sum / applied.tokens


@contextmanager
def _running(case: StateCase, seed: int) -> Iterator[tuple[Backend, Topology]]:
    model = _model(case, seed)
    world = Topology.detect().world_size
    base = Case(case.backend, precision=case.precision, offload=case.offload, micro=SEQUENCES // world)
    plan = replace(make_plan(base, SEQUENCES), replicas=case.replicas)
    with prepared(model, ModuleWeights(model), plan, _settings(case), case.threshold) as (engine, _, topology):
        yield engine, topology


def _model(case: StateCase, seed: int) -> nn.Module:
    """Two equal layers, a tied embedding, 5 rows, frozen tensors, buffers and a weight that is not contiguous."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = llama(0.0, tied=True)
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = torch.randn(weight.shape[::-1]).mul(0.02).t()
        assert not weight.is_contiguous()
        model.model.register_buffer("passes", torch.tensor(10 + seed))
        model.model.layers[1].register_buffer("scale", torch.randn(3, 2))
        if case.lora:
            return inject(model, LoraSection(rank=2, alpha=4, targets=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.freeze)
    return model


def _settings(case: StateCase) -> OptimizerSettings:
    groups = (ParameterGroup(pattern="model.layers.1.*", lr=2e-3, weight_decay=0.0),)
    if case.optimizer == "adamw":
        return AdamW(lr=1e-2, weight_decay=0.1, groups=groups)
    return SGD(name="sgd", lr=1e-2, momentum=0.9 if case.optimizer == "momentum" else 0.0, groups=groups)


class Collectives(TorchDispatchMode):
    """Counts the operations of torch.distributed that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def count_one() -> int:
    """What the counter says of one collective."""
    with Collectives() as counter:
        dist.all_reduce(torch.zeros(1))
    return counter.count
