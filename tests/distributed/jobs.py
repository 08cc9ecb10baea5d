"""What the pool's workers run: one small training job on a given backend."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.backends import make_backend, zero_config
from shardlab.backends.base import Applied, Backend, Job, OptimizerSettings
from shardlab.backends.optimizer import build_optimizer
from shardlab.model.deferred import build_deferred
from shardlab.model.matching import Matching
from shardlab.model.trainable import Trainable, make_trainable
from shardlab.plan import Offload, Plan
from shardlab.recipe import SGD, AdamW, ParameterGroup
from shardlab.topology import Topology
from tests.distributed.batches import sequences, window
from tests.distributed.models import MODELS

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Case:
    """One training job; the same in every rank."""

    backend: str = "ddp"
    model: str = "llama"
    data: str = "mixed"
    micro: int = 1
    steps: int = 3
    optimizer: str = "sgd"
    lr: float = 1.0
    clip: float | None = 1.0
    dropout: float = 0.0
    recompute: str = "none"
    compile: bool = False
    recompute_blocks: int | None = None  # so many of the first; None: all
    precision: str = "fp32"
    offload: str = "none"
    activations: str = "none"
    shared_memory: bool = True
    freeze: tuple[str, ...] = ()
    evaluate_first: bool = False
    threshold: int = 0  # ZeRO-3 keeps parameters below it gathered; tiny models would hide its faults
    poison_step: int | None = None  # the last rank's activations are infinite at that step
    forgotten: str | None = None  # the optimizer holds a copy of this tensor instead of the model's own
    idle: str | None = None  # a parameter group with a learning rate of 0
    groups: tuple[ParameterGroup, ...] = ()


@dataclass
class Outcome:
    """What came of a job on one rank. Whole tensors are kept on rank 0 only."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    evaluation: tuple[float, int]
    unchanged: list[str]
    local_elements: dict[str, int]  # of each tensor, what this rank holds before the first step
    held_after_steps: list[dict[str, int]]  # the same after each step
    state_elements: int  # of first moments on this rank
    buffers: Arrays
    dtypes: set[str]
    before: Arrays = field(default_factory=dict)
    after: Arrays = field(default_factory=dict)
    around_poison: list[Arrays] = field(default_factory=list)


def train(case: Case) -> Outcome:
    """Run `case` on this rank."""
    with running(case) as (engine, trainable, topology):
        first = dict(engine.tensors())
        before, around = arrays(first), []
        held = local_elements(trainable)
        batches = window(case.data, 99, case.micro, topology.rank, topology.world_size).micro_batches
        if case.evaluate_first:
            engine.evaluate(batches)
        applied: list[Applied] = []
        held_after: list[dict[str, int]] = []
        for step in range(case.steps):
            mine = window(case.data, step, case.micro, topology.rank, topology.world_size)
            with ExitStack() as stack:
                if step == case.poison_step:
                    around.append(whole(engine))
                    if topology.rank == topology.world_size - 1:
                        stack.enter_context(poisoned(trainable))
                applied.append(engine.run_window(mine, case.lr))
            held_after.append(local_elements(trainable))
            if step == case.poison_step:
                around.append(whole(engine))
        evaluation, after = engine.evaluate(batches), whole(engine)
        outcome = Outcome(
            losses=[one.loss_sum / one.tokens for one in applied],
            norms=[one.grad_norm for one in applied],
            skipped=[one.skipped for one in applied],
            evaluation=evaluation,
            unchanged=engine.unchanged_parameters(),
            local_elements=held,
            held_after_steps=held_after,
            state_elements=state_elements(engine.optimizer),
            buffers={name: buffer.float().numpy().copy() for name, buffer in trainable.named_buffers()},
            dtypes={str(tensor.dtype) for tensor in first.values()},
        )
        if topology.rank == 0:
            outcome.before, outcome.after, outcome.around_poison = before, after, around
        return outcome


@contextmanager
def running(case: Case) -> Iterator[tuple[Backend, Trainable, Topology]]:
    """The case's model on its backend, ready for the first window."""
    model, weights = build_deferred(lambda: MODELS[case.model](case.dropout), seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.freeze)
    plan = make_plan(case, sequences(case.data))
    with prepared(model, weights, plan, settings(case), case.threshold) as ready:
        yield ready


@contextmanager
def prepared(
    model: nn.Module,
    weights: Any,
    plan: Plan,
    optimizer: OptimizerSettings,
    threshold: int = 0,
    matching: Matching | None = None,
) -> Iterator[tuple[Backend, Trainable, Topology]]:
    """A backend that holds `model`; released afterwards, so that the next job starts from nothing."""
    topology = Topology.detect()
    trainable = make_trainable(model, seed=7)
    trainable.set_recompute(plan.recompute, plan.recompute_blocks)
    if matching is not None:
        trainable.take_in(matching)
    trainable.train()
    if plan.compile:
        trainable.compile_blocks()
    engine = make_backend(plan)
    with mock.patch.object(zero_config, "PERSISTENCE_THRESHOLD", threshold):
        engine.prepare(Job(trainable, plan, optimizer, topology), weights)
    try:
        yield engine, trainable, topology
    finally:
        engine.close()
        del engine, trainable
        gc.collect()


def make_plan(case: Case, global_batch_size: int) -> Plan:
    """The plan of `case` on the ranks that there are."""
    world = Topology.detect().world_size
    below_stage_3 = case.backend in ("zero1", "zero2")
    return Plan(
        shared_memory=case.shared_memory,
        backend=case.backend,
        world_size=world,
        micro_batch=case.micro,
        accumulation=global_batch_size // case.micro // world,
        global_batch_size=global_batch_size,
        precision=case.precision,
        recompute=case.recompute,
        recompute_blocks=case.recompute_blocks,
        clip_grad_norm=case.clip,
        compile=case.compile,
        offload=Offload("none" if below_stage_3 else case.offload, case.offload, case.activations),
    )


def settings(case: Case) -> OptimizerSettings:
    """The case's optimizer, or a factory of one that holds a stale tensor."""
    groups = case.groups
    if case.idle is not None:
        groups = (ParameterGroup(pattern=case.idle, lr=1e-30, weight_decay=0.0), *groups)
    chosen: AdamW | SGD = SGD(name="sgd", lr=case.lr, groups=groups)
    if case.optimizer == "adamw":
        chosen = AdamW(lr=case.lr, weight_decay=0.1, groups=groups)
    if case.forgotten is None:
        return chosen

    def stale(named: Any) -> Optimizer:
        return build_optimizer(
            chosen, [(n, nn.Parameter(p.detach().clone()) if n == case.forgotten else p) for n, p in named]
        )

    return stale


@contextmanager
def poisoned(trainable: Trainable) -> Iterator[None]:
    """The model's last block gives infinite activations inside."""

    def spoil(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return output * torch.tensor(float("inf"))

    hook = trainable.blocks[-1].register_forward_hook(spoil)
    yield
    hook.remove()


def whole(engine: Backend) -> Arrays:
    """Every tensor of the model (an array travels between processes by value, a tensor by a file descriptor)."""
    return arrays(dict(engine.tensors()))


def arrays(tensors: dict[str, Tensor]) -> Arrays:
    """Copies in fp32."""
    return {name: value.float().numpy().copy() for name, value in tensors.items()}


def local_elements(trainable: Trainable) -> dict[str, int]:
    """By tensor name, the number of elements in this rank's memory."""
    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        for name, parameter in trainable.named_canonical()
    }


def state_elements(optimizer: Any) -> int:
    """Elements of the first moments that this rank holds."""
    inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's stands around torch's
    moments = [state["exp_avg"] for state in inner.state.values() if "exp_avg" in state]
    return sum((moment.to_local() if isinstance(moment, DTensor) else moment).numel() for moment in moments)
