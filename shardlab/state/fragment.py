"""Fragments: what a rank holds of the training state, by name; and what a backend needs of whoever gives it back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from shardlab.state.box import Box

MASTER = "master"  # the value that is trained: fp32, whatever the precision to compute with
FROZEN = "frozen"  # the value of a tensor that is not trained, in its own dtype
BUFFER = "buffer"  # a persistent buffer's value


@dataclass(frozen=True)
class Fragment:
    """A box of one named tensor of training state.

    `name` is the model's own (whatever a backend wrapped), the canonical one of a tie. `kind` is `MASTER`, `FROZEN`,
    `BUFFER`, or the optimizer's own word for a state of the parameter's shape (`exp_avg`, `exp_avg_sq`, ...). `shape`
    is the whole tensor's; `data` has the box's lengths as its shape, lies on any device, and may be a view of live
    state: it is valid until the next step.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor


@dataclass(frozen=True)
class OptimizerState:
    """What of an optimizer has not a parameter's shape, by the names of the model's tensors. The same on every rank.

    `scalars[name]`: numbers kept per parameter (`step`); empty before the first update. `groups`: in each the `names`
    of its tensors and its options (`lr_scale`, `weight_decay`, `betas`, ...). `kinds`: the per-element states that it
    keeps, in order.
    """

    kinds: tuple[str, ...] = ()
    scalars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()


class StateReader(Protocol):
    """Gives training state back, whatever backend and world size it came from. Nothing here is collective."""

    optimizer: OptimizerState

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that there is, by name, with its whole shape."""
        ...

    def kinds(self, name: str) -> set[str]:
        """The kinds that there are of the tensor `name`; empty where it is not known."""
        ...

    def read_into(self, name: str, kind: str, box: Box, destination: Tensor) -> None:
        """Copy the elements of `box` into `destination`, of the box's lengths as its shape (any strides, any device).

        Values are converted to the destination's dtype. Reads only the bytes it needs. Raises UserError where the
        checkpoint lacks an element of it, or a file is not what its manifest says.
        """
        ...
