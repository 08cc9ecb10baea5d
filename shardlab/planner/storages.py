"""A dispatch mode that follows every storage from the operation that makes it to its last reference.

It keeps the live bytes by kind at every operation, so that the highest point can also be found for another size of
batch: two traces with the same operations give every point as a line in the batch's size.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.plan import KINDS, Kind, Span, Work
from shardlab.planner.work import NOTHING, work_of

Point = tuple[int, ...]  # live bytes, as `KINDS` are ordered


@dataclass
class Passage:
    """One segment's forward or backward pass, point by point.

    `kind` is what storages that outlive it are counted as; `operators` names what was called, in order.
    """

    phase: Literal["forward", "backward"]
    segment: int
    kind: Kind
    entry: Point
    exit: Point = ()
    points: list[Point] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    work: Work = NOTHING
    away: int = 0

    def span(self, *, without: Kind | None = None) -> Span:
        """Its highest point; `without` leaves a kind out, as if it had been freed at once."""
        skip = KINDS.index(without) if without is not None else None

        def total(point: Point) -> int:
            return sum(point) - (point[skip] if skip is not None else 0)

        entry, exit_, peak = (_bytes(point, skip) for point in (self.entry, self.exit, max(self.points, key=total)))
        if self.phase == "forward":
            # What does not outlive the span was never saved.
            named = max(0, peak.get("logits", 0) - exit_.get("logits", 0))
            passing = max(0, sum(peak.values()) - sum(exit_.values()) - named)
            passing = min(passing, peak.get(self.kind, 0))
            peak = {
                **peak,
                self.kind: peak.get(self.kind, 0) - passing,
                "temporaries": peak.get("temporaries", 0) + passing,
            }
        return Span(self.phase, self.segment, entry, peak, exit_, self.work, self.away)


def _bytes(point: Point, skip: int | None) -> dict[Kind, int]:
    return {kind: size for index, (kind, size) in enumerate(zip(KINDS, point, strict=True)) if size and index != skip}


def alike(one: list[Passage], other: list[Passage]) -> bool:
    """Whether two traces ran the same operations in the same order."""
    return [(p.phase, p.segment, p.operators) for p in one] == [(p.phase, p.segment, p.operators) for p in other]


def on_the_line(low: list[Passage], high: list[Passage], times: float) -> list[Passage]:
    """The trace that lies `times` the way from `low` to `high`, which are alike (beyond `high` above 1)."""

    def between(one: Point, other: Point) -> Point:
        return tuple(round(a + times * (b - a)) for a, b in zip(one, other, strict=True))

    return [
        replace(
            a,
            entry=between(a.entry, b.entry),
            exit=between(a.exit, b.exit),
            points=[between(*pair) for pair in zip(a.points, b.points, strict=True)],
            work=a.work * (1 - times) + b.work * times,
            away=round(a.away + times * (b.away - a.away)),
        )
        for a, b in zip(low, high, strict=True)
    ]


class Storages(TorchDispatchMode):
    """Live bytes of the storages that were made inside, by kind, and what is computed, passage by passage."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self.vocabulary: int | None = None  # of logits that are whole: they are a kind by themselves
        self.shared: torch.Size | None = None  # the shape of a weight with several uses, whose gradients meet
        self.times = 1  # how often what is computed now is computed in truth
        self.passages: list[Passage] = []
        self._sizes: dict[int, tuple[int, Kind]] = {}
        self._live: Counter[Kind] = Counter()
        self._before: set[int] = set()
        self._elsewhere = False

    def put_away(self, size: int) -> Tensor:
        """A tensor of `size` bytes that stands for one outside of this memory; the passage is told of it."""
        self._elsewhere = True
        try:
            made = torch.empty(size, dtype=torch.uint8)
        finally:
            self._elsewhere = False
        storage = made.untyped_storage()
        self._sizes[storage._cdata] = (0, self.kind)
        weakref.finalize(storage, self._free, storage._cdata)
        self.passages[-1].away += size
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.prim.device.default or self._elsewhere:
            return result
        if not func._schema.is_mutable or "out" not in func._schema.overload_name:
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, Tensor):
                    self._add(value, given=args)
        if func is torch.ops.aten.add.Tensor and self.passages[-1].phase == "backward":
            self._in_place(result, args[0])
        passage = self.passages[-1]
        passage.operators.append(func._schema.name)
        passage.points.append(self._point(_scratch(func, args, result)))
        work = work_of(func, args, kwargs, result)
        if work is not NOTHING:
            passage.work += work * self.times
        return result

    def _add(self, tensor: Tensor, given: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._before:
            return
        if any(isinstance(value, Tensor) and value.untyped_storage()._cdata == key for value in _flat(given)):
            self._before.add(key)  # a view of something that was there before: it outlives the trace
            return
        size = storage.nbytes()
        kind = "logits" if self._are_logits(tensor) else self.kind
        self._sizes[key] = (size, kind)
        self._live[kind] += size
        weakref.finalize(storage, self._free, key)

    def _in_place(self, total: Tensor, first: Tensor) -> None:
        """A weight's second gradient: autograd adds it to the first in place, but not to a stand-in for a tensor."""
        if total.shape != self.shared or first.shape != self.shared:
            return
        to, of = total.untyped_storage()._cdata, first.untyped_storage()._cdata
        if to in self._sizes and of in self._sizes and to != of:
            size, kind = self._sizes[to]
            self._live[kind] -= size
            self._sizes[to], self._sizes[of] = self._sizes[of], (0, kind)

    def _are_logits(self, tensor: Tensor) -> bool:
        # Weights' gradients are two-dimensional too, but none has the vocabulary for its last dimension.
        return self.vocabulary is not None and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary

    def _free(self, key: int) -> None:
        size, kind = self._sizes.pop(key)
        self._live[kind] -= size

    def rename(self, tensor: Tensor, kind: Kind) -> None:
        """Count `tensor`'s storage as another kind from here on."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            size, old = self._sizes[key]
            self._sizes[key] = (size, kind)
            self._live[old] -= size
            self._live[kind] += size

    def _point(self, scratch: int = 0) -> Point:
        return tuple(self._live[kind] + (scratch if kind == "temporaries" else 0) for kind in KINDS)

    def begin(self, phase: Literal["forward", "backward"], segment: int, kind: Kind) -> None:
        """Start a passage; what is made in it is of `kind`."""
        self.kind = kind
        now = self._point()
        self.passages.append(Passage(phase, segment, kind, now, points=[now]))

    def end(self) -> None:
        """End it."""
        self.passages[-1].exit = self._point()


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


_BINARY = {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"}


def _scratch(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a kernel of torch allocates and frees inside, where they are as large as its operands."""
    if func is torch.ops.aten.logsumexp.default:  # exp(x - max) whole
        return int(args[0].numel() * args[0].element_size())
    if func._schema.name.split("::")[1] in _BINARY:
        # On a CPU an operand of another type than the result's is converted first, whole.
        operands = [value for value in args[:2] if isinstance(value, Tensor) and value.dim() > 0]
        return sum(o.numel() * result.element_size() for o in operands if o.dtype != result.dtype)
    return 0
