"""How much of a model ZeRO-3 has gathered while a step runs; run by the pool."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.model.trainable import Trainable
from tests.distributed.batches import window
from tests.distributed.jobs import Case, running


class _Watch(TorchDispatchMode):
    """The most elements of a model's parameters that were there at once, at any matrix product."""

    def __init__(self, module: Trainable):
        super().__init__()
        self._parameters = list(module.parameters())
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.highest = max(self.highest, sum(parameter.data.numel() for parameter in self._parameters))
        return func(*args, **(kwargs or {}))


def steps(case: Case) -> list[tuple[int, int]]:
    """Of each step: the most elements gathered within it, and the modules that DeepSpeed takes to run after it."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    with running(case) as (engine, trainable, topology):
        found = []
        for step in range(case.steps):
            with _Watch(trainable) as watch:
                engine.run_window(window(case.data, step, case.micro, topology.rank, topology.world_size), case.lr)
            found.append((watch.highest, len(FWD_MODULE_STACK)))
        return found
