"""What every backend does: the protocol, and the few steps that all of them share.

DeepSpeed clips, steps and zeroes in one call, streaming owns forward and backward: so the protocol is a whole window,
not backward-clip-step. The rules that make the loss the same everywhere are kept here:

- a micro-batch's objective is (sum of its token losses) / (valid tokens of the global batch); gradients are summed over
  micro-batches and ranks, never averaged;
- the gradient norm is the global L2 norm of that gradient, before clipping;
- a window with a non-finite loss or gradient on any rank is applied on none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.data.window import MicroBatch, Window
from shardlab.model.deferred import Weights
from shardlab.model.teacher import Distillation
from shardlab.model.trainable import Trainable
from shardlab.plan import Plan
from shardlab.recipe import SGD, AdamW
from shardlab.state.fragment import Fragment, OptimizerState, StateReader
from shardlab.state.masks import Masks
from shardlab.topology import Topology

OptimizerFactory = Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer]
OptimizerSettings = AdamW | SGD | OptimizerFactory


@dataclass(frozen=True)
class Applied:
    """What became of a window. `loss_sum` and `tokens` are over the global batch; `grad_norm` is before clipping."""

    loss_sum: float
    tokens: int
    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class Job:
    """What a backend carries out: the module (its parameters on the meta device, or real), the plan, the machines.

    `directory` is for what a backend keeps on the disk while it runs; None is a temporary one. With `resume` it holds
    what a run of this job that was killed has left, and the backend goes on from there. What `masks` prune is
    zero after every update, in the masters and in the weights that compute.
    """

    module: Trainable
    plan: Plan
    optimizer: OptimizerSettings
    topology: Topology
    directory: Path | None = None
    resume: bool = False
    masks: Masks = field(default_factory=Masks)


class Backend(Protocol):
    """Carries out a plan.

    Every rank calls all methods in the same order; `fragments` and `optimizer_state` alone use no collective.
    """

    optimizer: Any  # torch's, or DeepSpeed's around it; its groups show the rates in force

    def prepare(self, job: Job, weights: Weights) -> None:
        """Materialise from `weights`, shard, and build the optimizer.

        The module must be used through this backend from here on; nothing of `weights` is kept.
        """
        ...

    def hold_teacher(self, distillation: Distillation, weights: Weights) -> None:
        """Materialise a teacher beside the module, after `prepare`; frozen weights are placed as the module's are.

        Raises UserError on a backend that can't.
        """
        ...

    def run_window(self, window: Window, lr: float) -> Applied:
        """Forward and backward over the window, then clip and update once, unless it is to be skipped."""
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(loss sum, tokens) over all ranks, without dropout. Ranks must bring the same number of batches."""
        ...

    def unchanged_parameters(self) -> list[str]:
        """After the first window: trainable tensors with a non-zero gradient whose values are what they were before."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model whole, on the CPU, one at a time, in the precision that it computes in."""
        ...

    def fragments(self) -> Iterator[Fragment]:
        """What this rank writes of the training state: views of it, valid until the next window.

        Over all ranks each element of each tensor is there exactly once: masters and the optimizer's per-element
        states of what is trained, the values of what is frozen, persistent buffers. Padding is not. Raises UserError
        where the optimizer keeps something that is no such state.
        """
        ...

    def optimizer_state(self) -> OptimizerState:
        """What of the optimizer has not a tensor's shape; the same on every rank."""
        ...

    def load(self, reader: StateReader) -> None:
        """Take over the training state that `reader` gives, whatever backend and world size it was saved by.

        After `prepare` and before the first window. Each rank reads only what it holds. Without moments (of one
        tensor or of all) the optimizer starts anew. Rates and other options stay those that the optimizer was built
        with. Raises UserError where the tensors or the optimizer are not those of this run, naming one.
        """
        ...

    def close(self) -> None:
        """Release what other engines in this process would trip over."""
        ...


def move(batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """The micro-batch's tensors on `device`."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}


def guarded(objective: Tensor) -> Tensor:
    """`objective`, with a gradient of NaN where its value is not finite: so the norm shows it, on every backend."""
    return objective * torch.where(torch.isfinite(objective.detach()), 1.0, torch.nan)


def all_reduce_sum(values: Tensor, topology: Topology) -> Tensor:
    """Sum `values` in place over all ranks."""
    if topology.world_size > 1:
        dist.all_reduce(values)
    return values


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums over a step are kept in: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def local_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Each tensor's own L2 norm, (len(tensors),), in `sum_dtype`."""
    if not tensors:
        return torch.zeros(0)
    norms = torch.stack(list(torch._foreach_norm(list(tensors))))
    return norms.to(sum_dtype(norms.device))


def scale_for_clipping(norm: float, limit: float | None) -> float | None:
    """What to multiply the gradients by; None where they stay as they are (as torch's clip_grad_norm_ does)."""
    if limit is None:
        return None
    factor = limit / (norm + 1e-6)
    return factor if factor < 1.0 else None


def sum_losses(
    module: nn.Module, trainable: Trainable, batches: Iterable[MicroBatch], topology: Topology
) -> tuple[float, int]:
    """Evaluate through `module` (the wrapped trainable): (loss sum, tokens) over all ranks."""
    device = torch.device(topology.device)
    totals = torch.zeros(2, dtype=sum_dtype(device), device=device)
    trainable.eval()
    with torch.no_grad():
        for batch in batches:
            tensors = move(batch, device)
            totals[0] += module(tensors, 1.0)
            totals[1] += count_targets(tensors)
    trainable.train()
    all_reduce_sum(totals, topology)
    return float(totals[0]), int(totals[1])


def count_targets(tensors: Mapping[str, Tensor]) -> Tensor:
    """Valid targets of a micro-batch, a scalar."""
    return (tensors["targets"] >= 0).sum()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """A number that changes when any bit of `tensor` does (with probability close to 1); no copy is made."""
    words = tensor.detach().contiguous().view(-1)
    return int(words.view(_WORDS[words.element_size()]).sum(dtype=torch.int64))


def ensure_process_group(topology: Topology) -> None:
    """A process group of one rank where there is none: device meshes and DeepSpeed ask for one."""
    if not dist.is_initialized():
        kind = "gloo" if torch.device(topology.device).type == "cpu" else None
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
