"""A few steps of a tiny model on this rank: through one of our backends, or DeepSpeed with a config as it is."""

import contextlib
import gc
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.backends import Job, make_backend
from shardlab.backends.base import OptimizerSettings, all_reduce_sum, ensure_process_group
from shardlab.data import Window, windows_from_batches
from shardlab.model.deferred import ModuleWeights
from shardlab.model.trainable import make_trainable
from shardlab.plan import Plan
from shardlab.runtime.extensions import without_shm_comm
from shardlab.topology import Topology

_LINEAR = torch.nn.functional.linear  # ZeRO-3 replaces it for the whole process

Batches = Callable[[int, int, int], Mapping[str, Tensor]]
Rate = Callable[[int], float]  # step -> learning rate


@dataclass(frozen=True)
class Step:
    """What one step computed. `weights` are whole, by name, in model order; on the first rank only."""

    loss: float
    grad_norm: float | None  # before clipping; None where DeepSpeed computes none
    weights: dict[str, Tensor]


def initial_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of a model that has not been handed to anyone yet."""
    return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def run_plan(
    model: nn.Module, plan: Plan, optimizer: OptimizerSettings, rate: Rate, batches: Batches, steps: int
) -> Iterator[Step]:
    """Train `model` by `plan` on our backend. Every rank iterates."""
    topology = Topology.detect()
    trainable = make_trainable(model, seed=plan.seed, recompute=plan.recompute)
    trainable.train()
    backend = make_backend(plan)
    backend.prepare(Job(trainable, plan, optimizer, topology), ModuleWeights(model))
    try:
        for step in range(steps):
            mine = _mine(plan.micro_batch, plan.accumulation, topology)
            rows = [batches(step, first, plan.micro_batch) for first in mine]
            applied = backend.run_window(_window(rows, step, topology), rate(step))
            weights = {name: value.float().clone() for name, value in backend.tensors()}
            yield Step(applied.loss_sum / applied.tokens, applied.grad_norm, weights if topology.is_main else {})
    finally:
        backend.close()
        gc.collect()


def _mine(micro: int, count: int, topology: Topology) -> range:
    """The first sequence of each of this rank's micro-batches, among all of a step."""
    share = micro * count
    return range(topology.rank * share, (topology.rank + 1) * share, micro)


def _window(rows: Sequence[Mapping[str, Tensor]], step: int, topology: Topology) -> Window:
    def total(values: Tensor) -> None:
        values.copy_(all_reduce_sum(values.to(topology.device), topology))

    windows = windows_from_batches(
        rows,
        accumulation=len(rows),
        rank=topology.rank,
        world_size=topology.world_size,
        all_reduce=total if topology.world_size > 1 else None,
        start_step=step,
    )
    return next(windows)


def run_ds_config(
    model: nn.Module,
    config: dict[str, Any],
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    rate: Rate | None,
    batches: Batches,
    steps: int,
) -> Iterator[Step]:
    """Train `model` as a script with `deepspeed.initialize(config=config)` would. Every rank iterates.

    `optimizer` is None where the config has one; `rate` where it has a scheduler, or the optimizer's rate is to stay.
    """
    import deepspeed

    topology = Topology.detect()
    device = torch.device(topology.device)
    _start_deepspeed(topology)
    model.to(device)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=None if optimizer is None else optimizer(list(model.named_parameters())),
            config=config,
            dist_init_required=False,
        )
    micro, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    try:
        for step in range(steps):
            if rate is not None:
                for group in engine.optimizer.param_groups:
                    group["lr"] = rate(step)
            loss = torch.zeros((), dtype=torch.float64)
            for first in _mine(micro, count, topology):
                batch = {name: tensor.to(device) for name, tensor in batches(step, first, micro).items()}
                output = engine(**batch).loss
                loss += output.detach().double().cpu() / count
                engine.backward(output)
                engine.step()
            norm = engine.get_global_grad_norm()
            yield Step(_mean(loss, topology), None if norm is None else float(norm), _whole(model, topology))
    finally:
        engine.destroy()
        torch.nn.functional.linear = _LINEAR
        gc.collect()


def _start_deepspeed(topology: Topology) -> None:
    """DeepSpeed's communication layer on top of the process group that there is, and none of its remarks."""
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    ensure_process_group(topology)
    cpu = topology.device_type == "cpu"
    if cpu:
        without_shm_comm()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo" if cpu else None, dist_init_required=False, verbose=False)


def _mean(loss: Tensor, topology: Topology) -> float:
    total = loss.to(topology.device, dtype=torch.float32)
    if topology.world_size > 1:
        dist.all_reduce(total)
    return float(total) / topology.world_size


def _whole(model: nn.Module, topology: Topology) -> dict[str, Tensor]:
    import deepspeed

    weights = {}
    for name, parameter in model.named_parameters():
        sharded = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if sharded else contextlib.nullcontext():
            weights[name] = parameter.detach().float().cpu().clone()
    return weights if topology.is_main else {}
