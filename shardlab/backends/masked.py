"""What keeps pruned weights zero, on every backend: in the initial values, after each update, and when state is loaded.

Gradients and moments of a pruned weight are left alone: an update by them, or by the decay, moves it, and what it
becomes is set to zero at once, before the weights that compute are made of it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardlab.model.deferred import Weights
from shardlab.model.trainable import Trainable
from shardlab.state.box import Box
from shardlab.state.fragment import OptimizerState, StateReader
from shardlab.state.held import ANY_VALUE
from shardlab.state.masks import Masks


@dataclass(frozen=True)
class Owned:
    """Values that an optimizer updates in `owner`: elements from `start` on of the flattened tensor `name`."""

    owner: Tensor
    name: str
    start: int
    values: Tensor


def keep_zeros(optimizer: Optimizer, masks: Masks, owned: Callable[[], Iterable[Owned]]) -> None:
    """After each update of `optimizer` set to zero what it holds of pruned weights.

    Of the owners in its groups then: DeepSpeed steps one at a time, and makes the computing weights of each at once.
    """

    def after(updated: Optimizer, *_: Any) -> None:
        if masks:
            now = {id(parameter) for group in updated.param_groups for parameter in group["params"]}
            for part in owned():
                if id(part.owner) in now:
                    masks.enforce(part.name, part.values, part.start)

    optimizer.register_step_post_hook(after)


class MaskedWeights:
    """Initial values, zero where they are pruned."""

    def __init__(self, weights: Weights, masks: Masks):
        self._weights = weights
        self._masks = masks

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        value = self._weights.tensor(name)
        if name in self._masks:
            value = value.clone()  # it may be the module's own
            self._masks.enforce(name, value)
        return value


def zero_pruned(module: Trainable, masks: Masks) -> None:
    """Set to zero, in place, what of `module`'s parameters is real already; of the others `MaskedWeights` is asked."""
    for name, parameter in module.named_canonical():
        if not parameter.is_meta:
            masks.enforce(name, parameter)


class MaskedReader:
    """Training state, with values that are zero where they are pruned, whoever saved it."""

    def __init__(self, reader: StateReader, masks: Masks):
        self._reader = reader
        self._masks = masks
        self._shapes = reader.shapes()
        self.optimizer: OptimizerState = reader.optimizer

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `StateReader.shapes`."""
        return self._shapes

    def kinds(self, name: str) -> set[str]:
        """See `StateReader.kinds`."""
        return self._reader.kinds(name)

    def read_into(self, name: str, kind: str, box: Box, destination: Tensor) -> None:
        """See `StateReader.read_into`."""
        self._reader.read_into(name, kind, box, destination)
        if kind in ANY_VALUE:
            self._masks.enforce_box(name, box, self._shapes[name], destination)
