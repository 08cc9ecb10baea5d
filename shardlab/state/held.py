"""What a rank holds in memory, as boxes of named tensors: the way from live state to fragments and back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardlab.errors import UserError
from shardlab.state.box import Box, boxes_of_range
from shardlab.state.fragment import BUFFER, FROZEN, MASTER, Fragment, StateReader
from shardlab.state.share import shares

VALUES = (MASTER, FROZEN)  # one thing of a tensor, whether it was trained or not
ANY_VALUE = (*VALUES, BUFFER)  # other tools' files don't tell buffers from parameters


@dataclass(frozen=True)
class Held:
    """All states that this rank holds of one box: by kind, live tensors with the box's lengths as their shape."""

    name: str
    shape: tuple[int, ...]
    box: Box
    states: Mapping[str, Tensor]


def held_range(name: str, shape: tuple[int, ...], start: int, states: Mapping[str, Tensor]) -> Iterator[Held]:
    """A part of a flattened tensor, as its boxes. `states`: 1-D, contiguous, the elements from `start` on."""
    numel = next(iter(states.values())).numel()
    done = 0
    for box in boxes_of_range(shape, start, start + numel):
        views = {kind: flat[done : done + box.numel].view(box.lengths) for kind, flat in states.items()}
        yield Held(name, shape, box, views)
        done += box.numel


def fragments_of(held: Sequence[Held], rank: int = 0, ranks: int = 1) -> Iterator[Fragment]:
    """What `rank` writes of `held`, which it and `ranks` - 1 others hold alike; all of it where it is alone."""
    for one, (start, stop) in zip(held, shares([one.box.numel for one in held], rank, ranks), strict=True):
        for inner in boxes_of_range(one.box.lengths, start, stop):
            offsets = tuple(a + b for a, b in zip(one.box.offsets, inner.offsets, strict=True))
            for kind, state in one.states.items():
                yield Fragment(one.name, kind, one.shape, Box(offsets, inner.lengths), state[inner.slices])


def read_held(held: Iterable[Held], reader: StateReader) -> None:
    """Read every state of `held` that the reader has, in place; a value must be there.

    The value of a tensor that was frozen and now is trained, or the reverse, is taken as it is; so is a buffer's.
    """
    for one in held:
        there = reader.kinds(one.name)
        for kind, state in one.states.items():
            source: str | None = kind
            if kind in ANY_VALUE:
                source = next((value for value in (kind, *ANY_VALUE) if value in there), None)
                if source is None and kind in VALUES:
                    raise UserError(f"the checkpoint has no value of the tensor {one.name}")
            if source is not None and source in there:
                reader.read_into(one.name, source, one.box, state)
