"""Jobs on one Linear(4, 1), whose losses, gradients and norms are known in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.backends.base import Applied
from shardlab.data.window import IGNORED, MicroBatch, Window
from shardlab.data.windows import evaluation_batches
from shardlab.model.deferred import build_deferred
from tests.distributed.jobs import Case, make_plan, prepared, settings, whole
from tests.distributed.models import SummedLinear

Losses = tuple[tuple[float, ...], ...]  # of each micro-batch over all ranks, the losses of its rows


@dataclass
class LinearOutcome:
    """One step, and the weight's values around it, (4,)."""

    applied: Applied
    before: NDArray[np.float32]
    after: NDArray[np.float32]


def step(case: Case, losses: Losses, infinite_loss_on: int | None = None) -> LinearOutcome:
    """One window. The inputs are such that each row's loss is the one given, spread over the four weights."""
    model, weights = build_deferred(SummedLinear, seed=0)
    plan = make_plan(case, len(losses))
    with prepared(model, weights, plan, settings(case)) as (engine, _, topology):
        mine = range(topology.rank * plan.accumulation, (topology.rank + 1) * plan.accumulation)
        batches = tuple(_micro_batch(torch.tensor(losses[i]), i) for i in mine)
        if topology.rank == infinite_loss_on:
            batches[-1].tensors["offsets"].fill_(torch.inf)
        before = whole(engine)["linear.weight"][0]
        applied = engine.run_window(Window(0, batches, sum(map(len, losses))), case.lr)
        return LinearOutcome(applied, before, whole(engine)["linear.weight"][0])


def _micro_batch(losses: Tensor, index: int) -> MicroBatch:
    return MicroBatch(
        {
            "inputs": losses.unsqueeze(1).expand(-1, 4) / 4,
            "offsets": torch.zeros_like(losses),
            "targets": torch.zeros(len(losses), dtype=torch.long),
        },
        index,
    )


class Numbered:
    """Rows whose loss is their own number."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        numbers = torch.as_tensor(np.asarray(indices))
        batch = dict(_micro_batch(numbers.float(), 0).tensors)
        return batch | {"targets": torch.where(numbers < 0, IGNORED, 0)}

    def valid_tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        return int((np.asarray(indices) >= 0).sum())


def evaluate(case: Case, count: int) -> tuple[float, int]:
    """Evaluate rows 0 .. count-1: (sum of their numbers, how many they were)."""
    model, weights = build_deferred(SummedLinear, seed=0)
    with prepared(model, weights, make_plan(case, 24), settings(case)) as (engine, _, topology):
        return engine.evaluate(
            evaluation_batches(
                Numbered(count), micro_batch=case.micro, rank=topology.rank, world_size=topology.world_size
            )
        )
