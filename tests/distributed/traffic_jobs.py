"""What the pool's workers run: a window whose collectives are written down as torch's dispatcher sees them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.planner.work import tensors
from tests.distributed.batches import window
from tests.distributed.jobs import Case, running

NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}


class Collectives(TorchDispatchMode):
    """(kind, bytes of the whole tensor) of every collective inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(args)]
            self.seen.append((NAMES.get(name, name), max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def collectives(case: Case) -> tuple[list[tuple[str, int]], Any, int]:
    """Those of the third window; the first makes state and is checked, ZeRO-3's first two find the order out."""
    with running(case) as (engine, _trainable, topology):
        torch.manual_seed(0)
        mine = [window(case.data, step, case.micro, topology.rank, topology.world_size) for step in range(3)]
        for one in mine[:2]:
            engine.run_window(one, case.lr)
        with Collectives() as found:
            engine.run_window(mine[2], case.lr)
        return found.seen, len(mine[2].micro_batches), topology.world_size
