"""A rank's files: planned from what the fragments say, then written front to back, hashed on the way.

Beside the live state a writer holds one buffer: values that do not lie contiguous in host memory (another device, a
strided view) go through it piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from shardlab.checkpoint.layout import FilePlan, Part, header
from shardlab.checkpoint.manifest import FileEntry
from shardlab.checkpoint.storage import Storage, Writer
from shardlab.state.box import boxes_of_range

BUFFER_BYTES = 8 * 1024**2
WRITE_BYTES = 1024**2  # in one call; with 8 MiB or whole tensors at once Linux took two to three times as long


@dataclass(frozen=True)
class Written:
    """What a rank wrote: its files with the hashes, and the parts in them."""

    entry: FileEntry
    parts: list[Part]


class _OpenFile:
    """A file that is being written, by its plan."""

    def __init__(self, directory: Path, plan: FilePlan, storage: Storage):
        self._plan = plan
        self._file: Writer = storage.create(directory / plan.name)
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._written = 0
        self.append(memoryview(header(plan.parts)))

    def append(self, data: memoryview) -> None:
        for start in range(0, len(data), WRITE_BYTES):
            piece = data[start : start + WRITE_BYTES]
            self._hash.update(piece)
            self._file.write(piece)
        self._bytes += len(data)

    def add(self, part: Part, data: Tensor, buffer: Tensor) -> bool:
        """Write the next part; return whether it was the last."""
        if part != self._plan.parts[self._written]:
            raise RuntimeError(f"{part.key} came where {self._plan.parts[self._written].key} was announced")
        for piece in raw_pieces(data, buffer):
            self.append(piece)
        self._written += 1
        return self._written == len(self._plan.parts)

    def finish(self) -> Written:
        self._file.sync()
        self.close()
        entry = FileEntry(name=self._plan.name, bytes=self._bytes, xxh3_128=self._hash.hexdigest())
        return Written(entry, self._plan.parts)

    def close(self) -> None:
        self._file.close()


def write_files(
    directory: Path, plans: list[FilePlan], parts: Iterable[tuple[Part, Tensor]], storage: Storage
) -> list[Written]:
    """Write `parts` by `plans`, in one pass and in their order. Returns what was written, all of it on the disk.

    Raises RuntimeError where the parts are not those that were planned, OSError where writing fails.
    """
    where = {part: plan for plan in plans for part in plan.parts}
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    opened: dict[str, _OpenFile] = {}
    done: dict[str, Written] = {}
    with ExitStack() as stack:
        for part, data in parts:
            plan = where.pop(part, None)
            if plan is None:
                continue  # another rank writes this replica
            file = opened.get(plan.name)
            if file is None:
                file = opened[plan.name] = _OpenFile(directory, plan, storage)
                stack.callback(file.close)
            if file.add(part, data, buffer):
                done[plan.name] = file.finish()
    if where:
        raise RuntimeError(
            f"{len(where)} parts of the training state were announced and never came: {next(iter(where)).key}"
        )
    return [done[plan.name] for plan in plans]


def raw_pieces(data: Tensor, buffer: Tensor) -> Iterator[memoryview]:
    """The bytes of `data` in row-major order. A piece is valid until the next one is asked for."""
    if data.device.type == "cpu" and data.is_contiguous():
        yield memory(data)
        return
    scratch = buffer.view(data.dtype)
    shape = tuple(data.shape)
    for start in range(0, data.numel(), len(scratch)):
        filled = 0
        for box in boxes_of_range(shape, start, min(start + len(scratch), data.numel())):
            scratch[filled : filled + box.numel].view(box.lengths).copy_(data[box.slices])
            filled += box.numel
        yield memory(scratch[:filled])


def memory(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    # Not reshape(-1): one element may have any stride, and a view of bytes wants 1.
    raw: memoryview = data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8).numpy().data
    return raw
