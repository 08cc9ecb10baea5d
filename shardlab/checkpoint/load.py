"""Giving training state back: any box of any tensor, from the byte ranges that hold it.

A box that spans many small runs of a file is read in blocks of whole rows and cut out of them; a long run goes straight
to its destination where that lies contiguous in host memory. Nothing is mapped, and one buffer is reused, so the
process grows by what it loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.manifest import DamagedError, Manifest, TensorEntry
from shardlab.checkpoint.storage import LocalStorage, Reader, Storage
from shardlab.checkpoint.verification import open_file, read_manifest
from shardlab.checkpoint.write import memory
from shardlab.errors import UserError
from shardlab.state.box import Box

BUFFER_BYTES = 8 * 1024**2
RUN_BYTES = 64 * 1024  # a shorter run is read with what lies between it and the next


class CheckpointReader:
    """A `StateReader` over a checkpoint's directory. Give it back with `close`, or use it in a `with`.

    Opening checks the manifest and the sizes of the files that are read. Whether their bytes are what was written is
    `verify`'s to say: it is asked once, by all ranks together, not by each for what it reads.
    """

    def __init__(self, directory: Path, storage: Storage | None = None):
        self.directory = directory
        self._storage = storage or LocalStorage()
        self.manifest: Manifest = read_manifest(directory, self._storage)
        self.optimizer = self.manifest.optimizer.state()
        self._tensors: dict[str, dict[str, TensorEntry]] = {}
        for entry in self.manifest.tensors:
            self._tensors.setdefault(entry.name, {})[entry.kind] = entry
        self._open: dict[int, Reader] = {}
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        self.bytes_read = 0

    def names(self) -> list[str]:
        """The tensors, by canonical name, as saved."""
        return list(self._tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateReader.shapes`."""
        return {name: next(iter(kinds.values())).shape for name, kinds in self._tensors.items()}

    def kinds(self, name: str) -> set[str]:
        """See `StateReader.kinds`; a tied tensor is known by all its names."""
        return set(self._tensors.get(self._canonical(name), {}))

    def entry(self, name: str, kind: str) -> TensorEntry:
        """Shape and dtype of a tensor. Raises UserError where there is none of that kind."""
        found = self._tensors.get(self._canonical(name), {}).get(kind)
        if found is None:
            raise UserError(f"checkpoint {self.directory} holds no {kind} of {name}")
        return found

    def read_into(self, name: str, kind: str, box: Box, destination: Tensor) -> None:
        """See `StateReader.read_into`."""
        entry = self.entry(name, kind)
        if not box.fits(entry.shape):
            raise UserError(
                f"checkpoint {self.directory}: {name} ({kind}) has shape {entry.shape}, which {box.lengths} elements "
                f"at {box.offsets} are not inside: it is of another model"
            )
        if tuple(destination.shape) != box.lengths:
            raise ValueError(f"a destination of shape {tuple(destination.shape)} for {box}")
        found = 0
        with torch.no_grad():
            for piece in entry.pieces:
                stored = Box(piece.offsets, piece.lengths)
                part = stored.intersection(box)
                if part is None:
                    continue
                found += part.numel
                target = destination[part.within(box).slices]
                self._read(piece.file, piece.begin, stored.lengths, part.within(stored), DTYPES[entry.dtype], target)
        if found != box.numel:
            raise DamagedError(f"checkpoint {self.directory} lacks elements of {name} ({kind})")

    def close(self) -> None:
        """Close the files."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _canonical(self, name: str) -> str:
        return self.manifest.aliases.get(name, name)

    def _read(
        self, file: int, begin: int, stored: tuple[int, ...], part: Box, dtype: torch.dtype, target: Tensor
    ) -> None:
        """`part` of an array of shape `stored` that lies at byte `begin` of a file, into `target`."""
        limit = BUFFER_BYTES // dtype.itemsize
        for block in blocks(stored, part, limit, RUN_BYTES // dtype.itemsize):
            start = begin + block.start * dtype.itemsize
            into = target[block.target.slices]
            whole = block.cut.lengths == block.shape
            if whole and into.dtype == dtype and into.is_contiguous() and into.device.type == "cpu":
                self._fetch(file, start, memory(into))
                continue
            raw = self._buffer[: math.prod(block.shape) * dtype.itemsize]
            self._fetch(file, start, memory(raw))
            into.copy_(raw.view(dtype).view(block.shape)[block.cut.slices].view(into.shape))

    def _fetch(self, file: int, offset: int, buffer: memoryview) -> None:
        reader = self._open.get(file)
        if reader is None:
            reader = self._open[file] = open_file(self.directory, self.manifest.files[file], self._storage)
        if reader.read_into(offset, buffer) != len(buffer):
            raise DamagedError(f"{self.directory / self.manifest.files[file].name} ends while it is read")
        self.bytes_read += len(buffer)


@dataclass(frozen=True)
class Block:
    """A stretch of a file to read at once: an array of `shape` from the element `start` on.

    Of it `cut` is wanted, and goes to `target`, a box of what is asked for (with dims of one element before `cut`'s).
    """

    start: int
    shape: tuple[int, ...]
    cut: Box
    target: Box


def blocks(stored: tuple[int, ...], part: Box, limit: int, run: int) -> Iterator[Block]:
    """What to read for `part` of an array of shape `stored`, in row-major order; `limit` elements at a time at most.

    Whole rows are read together where they are wanted whole, or where the gap between what is wanted of them is
    shorter than that, or than `run` elements.
    """
    yield from _blocks(stored, part, limit, run, 0, ())


def _blocks(
    stored: tuple[int, ...], part: Box, limit: int, run: int, start: int, before: tuple[int, ...]
) -> Iterator[Block]:
    dim = len(before)
    ones = (1,) * dim
    if dim == len(stored):
        yield Block(start, (), Box((), ()), Box(before, ones))
        return
    inner, offsets, lengths = stored[dim + 1 :], part.offsets[dim + 1 :], part.lengths[dim + 1 :]
    row, wanted, count = math.prod(inner), math.prod(lengths), part.lengths[dim]
    start += part.offsets[dim] * row
    if row > limit or row - wanted > max(wanted, run):
        for index in range(count):
            yield from _blocks(stored, part, limit, run, start + index * row, (*before, index))
        return
    rest = (0,) * len(inner)
    step = limit // row
    for index in range(0, count, step):
        rows = min(step, count - index)
        target = Box((*before, index, *rest), (*ones, rows, *lengths))
        yield Block(start + index * row, (rows, *inner), Box((0, *offsets), (rows, *lengths)), target)
