"""Boxes: axis-aligned parts of a tensor, in elements. The only shape that training state has in a checkpoint.

FSDP's shards are boxes as they are; ZeRO's flat ranges become a few of them; so whoever reads needs one rule only: the
intersection of two boxes is a box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """`lengths[d]` elements from `offsets[d]` on in each dim d. Of a scalar: two empty tuples."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(f"a box of {len(self.offsets)} offsets and {len(self.lengths)} lengths")
        if any(offset < 0 for offset in self.offsets) or any(length < 1 for length in self.lengths):
            raise ValueError(f"a box at {self.offsets} of {self.lengths} elements")

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts it out of a tensor of the whole shape."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.lengths, strict=True))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it lies inside a tensor of `shape`."""
        return len(shape) == len(self.offsets) and all(
            offset + length <= size for offset, length, size in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """What both cover; None where that is nothing."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(a, b) for a, b in zip(self._stops(), other._stops(), strict=True))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def within(self, outer: Box) -> Box:
        """The same elements, by offsets relative to `outer`, which covers it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def _stops(self) -> tuple[int, ...]:
        return tuple(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))


def whole(shape: tuple[int, ...]) -> Box | None:
    """The box of all of a tensor; None where it has no elements."""
    return Box((0,) * len(shape), tuple(shape)) if all(shape) else None


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a flattened tensor of `shape`, as at most 2 * len(shape) - 1 boxes.

    In the order of the flat range, and each of them contiguous in it: their elements one after another are the range.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"the range [{start}, {stop}) of a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _at(first, boxes_of_range(shape[1:], head, tail))
    boxes = []
    if head:
        boxes += _at(first, boxes_of_range(shape[1:], head, row))
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if tail:
        boxes += _at(last, boxes_of_range(shape[1:], 0, tail))
    return boxes


def _at(index: int, boxes: list[Box]) -> list[Box]:
    """`boxes` of one row, as boxes of the tensor that has it at `index`."""
    return [Box((index, *box.offsets), (1, *box.lengths)) for box in boxes]
