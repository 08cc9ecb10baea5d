"""AdamW and SGD on flat pieces of a segment: the arithmetic of torch's own, in the same order.

A piece is any range of a segment's trained plane. Both rules look at one element at a time, so where a piece ends
changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlab.backends.stream.layout import Layout, Segment, overlaps, runs
from shardlab.backends.stream.record import Pending
from shardlab.errors import UserError
from shardlab.state.masks import Masks


@dataclass(frozen=True)
class _Run:
    """Elements [start, stop) of a plane: their group's number, and the updates they had before this store."""

    start: int
    stop: int
    group: int
    steps: int


class Update:
    """Applies updates by the groups of an optimizer that holds no state itself.

    `kinds` are the names of the per-element states, as torch has them. What `masks` prune is zero after each.
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, masks: Masks | None = None):
        """Raises UserError for an optimizer that is not one of these two."""
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._layout = layout
        self._masks = masks if masks is not None else Masks()
        self._adam = isinstance(optimizer, torch.optim.AdamW)
        self.kinds = _kinds(optimizer)
        self.steps = {}

    @property
    def steps(self) -> Mapping[str, int]:
        """Updates that each tensor had before the store was made; none where it is not named."""
        return self._steps

    @steps.setter
    def steps(self, steps: Mapping[str, int]) -> None:
        self._steps = steps
        of_name = {
            name: (number, steps.get(name, 0)) for number, group in enumerate(self._groups) for name in group["names"]
        }
        distinct = sorted(set(of_name.values()))
        keys = {name: distinct.index(pair) for name, pair in of_name.items()}
        self._runs = [
            [_Run(start, stop, *distinct[key]) for start, stop, key in runs(segment, keys)]
            for segment in self._layout.segments
        ]

    def apply(
        self,
        segment: Segment,
        start: int,
        planes: Sequence[Tensor],
        gradient: Tensor,
        pending: Pending,
        updates: int,
    ) -> None:
        """Update in place the piece of `segment` from element `start` on.

        `planes`: masters, then each kind's state; `updates` counts those of this store, this one included. `gradient`
        is spoilt.
        """
        if pending.scale is not None:
            gradient.mul_(pending.scale)
        stop = start + gradient.numel()
        for run in self._runs[segment.index]:
            first, last = max(start, run.start), min(stop, run.stop)
            if first < last:
                piece = slice(first - start, last - start)
                group = self._groups[run.group]
                states = [plane[piece] for plane in planes]
                lr = pending.lr * group["lr_scale"]
                if self._adam:
                    _adamw(states, gradient[piece], group, lr, run.steps + updates)
                else:
                    _sgd(states, gradient[piece], group, lr)
        if self._masks:
            for part, where, first in overlaps(segment, start, stop, trained=True):
                self._masks.enforce(part.name, planes[0][where], first)


def _kinds(optimizer: Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.AdamW) and not optimizer.defaults["amsgrad"]:
        return ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["nesterov"]:
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    raise UserError(
        f"backend stream updates by AdamW or SGD (without amsgrad or nesterov), not by {type(optimizer).__name__}: "
        "take one of them, or another shard.backend"
    )


def _adamw(states: list[Tensor], gradient: Tensor, group: Mapping[str, Any], lr: float, step: int) -> None:
    value, first, second = states
    torch._fused_adamw_(
        [value],
        [gradient],
        [first],
        [second],
        [],
        [torch.tensor(float(step))],
        amsgrad=False,
        lr=lr,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group.get("maximize", False),
    )


def _sgd(states: list[Tensor], gradient: Tensor, group: Mapping[str, Any], lr: float) -> None:
    value = states[0]
    if group["weight_decay"]:
        gradient.add_(value, alpha=group["weight_decay"])
    if len(states) == 2:
        # From zero the first update leaves the gradient itself, as torch does (its dampening does not count there).
        gradient = states[1].mul_(group["momentum"]).add_(gradient)
    value.add_(gradient, alpha=-lr)
