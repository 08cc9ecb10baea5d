"""How a rank's fragments lie in its files: safetensors, written front to back in the order of the fragments.

A file's bytes are a function of what the manifest says of it, header included, so a header is compared and never
interpreted: whatever a foreign one declares, nothing is allocated by it. The element sizes of a file are all the same,
so each tensor is aligned, which the safetensors library wants of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardlab.state.box import Box
from shardlab.state.fragment import Fragment

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the types that training state may have."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """What is stored of one tensor in one place: a fragment, or a piece of one that is larger than a file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES
    box: Box

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return self.box.numel * DTYPES[self.dtype].itemsize

    @property
    def key(self) -> str:
        """Its name in the safetensors file: the tensor's, the kind, and where the box begins."""
        return f"{self.name}|{self.kind}|{','.join(str(offset) for offset in self.box.offsets)}"


@dataclass
class FilePlan:
    """A file that is to be written: its parts one after another."""

    name: str
    parts: list[Part] = field(default_factory=list)
    data_bytes: int = 0

    def add(self, part: Part) -> None:
        """Append `part`."""
        self.parts.append(part)
        self.data_bytes += part.bytes


def parts_of(fragments: Iterable[Fragment], file_bytes: int) -> Iterator[tuple[Part, Tensor]]:
    """The fragments with their values, each cut along its first dims into parts of at most `file_bytes`.

    Raises RuntimeError for a fragment that is not what it says, or of a type that has no name in DTYPES.
    """
    for fragment in fragments:
        label = f"{fragment.name} ({fragment.kind})"
        if fragment.data.dtype not in _NAMES:
            raise RuntimeError(f"{label} has dtype {fragment.data.dtype}, which a checkpoint has no name for")
        if tuple(fragment.data.shape) != fragment.box.lengths or not fragment.box.fits(fragment.shape):
            raise RuntimeError(
                f"{label}: data of shape {tuple(fragment.data.shape)} for {fragment.box} of {fragment.shape}"
            )
        for box in _cut(fragment.box, file_bytes // fragment.data.element_size()):
            part = Part(fragment.name, fragment.kind, tuple(fragment.shape), _NAMES[fragment.data.dtype], box)
            yield part, fragment.data[box.within(fragment.box).slices].detach()


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """`box` in pieces of at most `limit` elements (at least one), each contiguous in its row-major order."""
    dim = next((d for d, length in enumerate(box.lengths) if length > 1), None)
    if dim is None or box.numel <= limit:
        yield box
        return
    row = box.numel // box.lengths[dim]
    step = max(1, limit // row)
    for start in range(0, box.lengths[dim], step):
        length = min(step, box.lengths[dim] - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        piece = Box(offsets, (*box.lengths[:dim], length, *box.lengths[dim + 1 :]))
        yield from _cut(piece, limit) if length == 1 else [piece]


def plan_files(parts: Iterable[Part], rank: int, file_bytes: int) -> list[FilePlan]:
    """Files of at most `file_bytes` of data for `parts`, in their order, one element size a file."""
    files: list[FilePlan] = []
    current: dict[int, FilePlan] = {}
    for part in parts:
        size = DTYPES[part.dtype].itemsize
        plan = current.get(size)
        if plan is None or plan.data_bytes + part.bytes > file_bytes:
            plan = current[size] = FilePlan(f"rank-{rank:05d}-{len(files):05d}.safetensors")
            files.append(plan)
        plan.add(part)
    return files


def header(parts: Iterable[Part]) -> bytes:
    """The first bytes of a safetensors file that holds `parts` one after another: a length, and JSON of that length."""
    return safetensors_header((part.key, part.dtype, part.box.lengths) for part in parts)


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], **metadata: str) -> bytes:
    """The same of (key, a key of DTYPES, shape)."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for key, dtype, shape in tensors:
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    return len(text).to_bytes(8, "little") + text


def assign(held: list[list[Part]]) -> list[list[Part]]:
    """What each rank writes of what each holds: every part once, replicas shared out by bytes.

    The same on every rank, from what all hold. Raises RuntimeError where ranks disagree on a tensor.
    """
    holders: dict[Part, list[int]] = {}
    described: dict[tuple[str, str], Part] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            known = described.setdefault((part.name, part.kind), part)
            if (known.shape, known.dtype) != (part.shape, part.dtype):
                raise RuntimeError(f"{part.name} ({part.kind}) is {known} on one rank and {part} on rank {rank}")
            holders.setdefault(part, []).append(rank)
    load = [sum(part.bytes for part in parts if len(holders[part]) == 1) for parts in held]
    writer = {part: ranks[0] for part, ranks in holders.items()}
    replicated = [part for part, ranks in holders.items() if len(ranks) > 1]
    for part in sorted(replicated, key=lambda part: -part.bytes):  # the largest first fills up evenly
        writer[part] = min(dict.fromkeys(holders[part]), key=load.__getitem__)
        load[writer[part]] += part.bytes
    return [[part for part in dict.fromkeys(parts) if writer[part] == rank] for rank, parts in enumerate(held)]
