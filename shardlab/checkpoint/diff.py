"""How two checkpoints differ: which tensors, and by how much; read in pieces, whatever boxes each of them has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.manifest import TensorEntry
from shardlab.state.box import Box, boxes_of_range

ELEMENTS = 1 << 20  # compared at a time


@dataclass(frozen=True)
class Difference:
    """A tensor, or another part of the state, that is not the same in both.

    `largest` is the largest absolute difference, `relative` the L2 norm of the difference by that of the first; both
    are None where values can't be compared.
    """

    name: str
    kind: str
    what: str
    largest: float | None = None
    relative: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: such a number is given as text."""
        values = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    def text(self) -> str:
        """As people see it."""
        return f"{self.name} ({self.kind}): {self.what}" if self.kind else f"{self.name}: {self.what}"


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """What differs, tensor by tensor in the order of the first; nothing where the state is the same bit for bit.

    The step, the optimizer's scalars and groups, the schedule and the cursor are compared too; recipe, plan, versions
    and how the tensors are cut are not. Raises UserError where a checkpoint is damaged.
    """
    with CheckpointReader(first) as one, CheckpointReader(second) as other:
        for part in ("step", "aliases", "optimizer", "schedule", "cursor"):
            left, right = getattr(one.manifest, part), getattr(other.manifest, part)
            if left != right:
                numbers = f"{left} and {right}" if part == "step" else "differs"
                yield Difference(part, "", numbers)
        theirs = {(entry.name, entry.kind): entry for entry in other.manifest.tensors}
        for entry in one.manifest.tensors:
            match = theirs.pop((entry.name, entry.kind), None)
            found = Difference(entry.name, entry.kind, f"only in {first}")
            if match is not None:
                compared = _compare(one, other, entry, match)
                if compared is None:
                    continue
                found = compared
            yield found
        for name, kind in theirs:
            yield Difference(name, kind, f"only in {second}")


def _compare(
    one: CheckpointReader, other: CheckpointReader, entry: TensorEntry, match: TensorEntry
) -> Difference | None:
    if entry.shape != match.shape:
        return Difference(entry.name, entry.kind, f"shape {list(entry.shape)} and {list(match.shape)}")
    largest = square = reference = 0.0
    differing = 0
    for box in _boxes(entry.shape):
        left, right = (_values(reader, e, box) for reader, e in ((one, entry), (other, match)))
        same = left == right if left.dtype != right.dtype else _bits(left) == _bits(right)
        differing += int((~same).sum())
        before = left.double()
        change = torch.where(same, 0.0, right.double() - before)
        largest = max(largest, float(change.abs().nan_to_num(nan=math.inf).max()))
        square += float(change.square().sum())
        reference += float(before.square().sum())
    if entry.dtype == match.dtype and differing == 0:
        return None
    relative = math.sqrt(square / reference) if reference > 0 and math.isfinite(square / reference) else math.inf
    relative = 0.0 if square == 0 else relative
    types = f"dtype {entry.dtype} and {match.dtype}; " if entry.dtype != match.dtype else ""
    what = f"{types}{differing:,} of {math.prod(entry.shape):,} elements differ, by up to {largest:g}"
    return Difference(entry.name, entry.kind, f"{what} (relative L2 {relative:.2e})", largest, relative)


def _boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    """The whole of a tensor in boxes of at most `ELEMENTS`."""
    size = math.prod(shape)
    for start in range(0, size, ELEMENTS):
        yield from boxes_of_range(shape, start, min(start + ELEMENTS, size))


def _values(reader: CheckpointReader, entry: TensorEntry, box: Box) -> Tensor:
    into = torch.empty(box.lengths, dtype=DTYPES[entry.dtype])
    reader.read_into(entry.name, entry.kind, box, into)
    return into.reshape(-1)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: Tensor) -> Tensor:
    return values.view(_WORDS[values.element_size()])
