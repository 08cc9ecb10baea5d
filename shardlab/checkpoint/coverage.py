"""Whether boxes make up a tensor: every element in one of them, none in two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Span(Protocol):
    """A box as the check takes it: anything with offsets and lengths inside the shape."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in each dim."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Its size in each dim."""
        ...


def coverage_fault(shape: tuple[int, ...], boxes: Sequence[Span]) -> str | None:
    """What is wrong: "element (0, 3) is missing" or "element (0, 3) is there twice"; None where the boxes tile it.

    Sweeps dim by dim: between two boundaries of a dim the same boxes are met, so their cross-sections must tile the
    rest. About n log n for n shards along one dim or a grid of them; no array of the tensor's size is made.
    """
    if not all(shape):
        return "it has no elements, but boxes" if boxes else None
    return _fault(shape, 0, boxes, ())


def _fault(shape: tuple[int, ...], dim: int, boxes: Sequence[Span], at: tuple[int, ...]) -> str | None:
    if not boxes:
        return f"element {_spelled(shape, at)} is missing"
    if len(boxes) == 1 and boxes[0].lengths[dim:] == shape[dim:]:
        return None
    if dim == len(shape):
        return f"element {_spelled(shape, at)} is there twice"
    order = sorted(boxes, key=lambda box: box.offsets[dim])
    boundaries = {0, *(box.offsets[dim] for box in boxes), *(box.offsets[dim] + box.lengths[dim] for box in boxes)}
    active: list[Span] = []
    upcoming = 0
    for position in sorted(boundaries | {shape[dim]})[:-1]:
        active = [box for box in active if box.offsets[dim] + box.lengths[dim] > position]
        while upcoming < len(order) and order[upcoming].offsets[dim] == position:
            active.append(order[upcoming])
            upcoming += 1
        fault = _fault(shape, dim + 1, active, (*at, position))
        if fault is not None:
            return fault
    return None


def _spelled(shape: tuple[int, ...], at: tuple[int, ...]) -> str:
    whole = (*at, *(0 for _ in shape[len(at) :]))
    return f"({', '.join(str(index) for index in whole)})"
