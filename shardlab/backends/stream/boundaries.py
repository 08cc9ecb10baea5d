"""The blocks' inputs between forward and backward pass: in memory, or, beyond a limit, in a file.

The first blocks' inputs go to the file, for they are needed last: by then they have been read while later blocks
computed.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shardlab.backends.stream.direct import SECTOR, DirectFile, aligned

STAGED = 2  # blocks' inputs on their way: one being used, one being written or read


def spilled(blocks: int, size: int, limit: int | None) -> int:
    """How many of the blocks' inputs, of `size` bytes each, go to the file so that the others take `limit` bytes."""
    if limit is None or limit // size >= blocks:
        return 0
    return blocks - max(0, limit // size - STAGED)


class Boundaries:
    """Keeps each block's input of every micro-batch of a window."""

    def __init__(self, path: Path, blocks: int, limit_bytes: int | None = None):
        """At most `limit_bytes` of memory (but at least `STAGED` blocks' inputs); None: no limit, and no file."""
        self._path = path
        self._blocks = blocks
        self._limit = limit_bytes
        self._kept: dict[int, list[Tensor]] = {}
        self._spilled = 0  # numbers below it are in the file
        self._shapes: list[torch.Size] = []
        self._file: DirectFile | None = None
        self._buffers: list[Tensor] = []
        self._moves: dict[int, Future[None]] = {}  # by buffer, the last that was asked of it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream-activations")
        self.bytes_moved = 0

    def put(self, number: int, hidden: Sequence[Tensor]) -> None:
        """Keep the inputs of block `number`; numbers come in ascending order from 0."""
        if number == 0:
            self._begin(hidden)
        if number >= self._spilled:
            self._kept[number] = list(hidden)
            return
        buffer = self._free_buffer(number)
        for source, target in zip(hidden, self._views(buffer, hidden[0]), strict=True):
            target.copy_(source)
        assert self._file is not None
        self._moves[number % STAGED] = self._thread.submit(self._file.write, buffer, number * len(buffer))
        self.bytes_moved += len(buffer)

    def take(self, number: int, *, ahead: bool) -> list[Tensor]:
        """Them again, once, in descending order; `ahead`: the number before is asked for next.

        They are valid until the number before is asked for.
        """
        kept = self._kept.pop(number, None)
        if kept is None:
            self._read(number)
            self._moves.pop(number % STAGED).result()
        if ahead and number - 1 < self._spilled:
            self._read(number - 1)
        if kept is not None:
            return kept
        return [view.to(self._device) for view in self._views(self._buffers[number % STAGED], self._like)]

    def clear(self) -> None:
        """Forget what was not asked for."""
        self._kept.clear()
        self._reading = -1

    def close(self) -> None:
        """End the thread and close the file."""
        self._thread.shutdown(wait=True)
        if self._file is not None:
            self._file.close()

    _reading = -1  # the number that a buffer has or is getting

    def _begin(self, hidden: Sequence[Tensor]) -> None:
        self._shapes = [one.shape for one in hidden]
        self._like, self._device = hidden[0].new_empty(0), hidden[0].device
        size = sum(one.numel() * one.element_size() for one in hidden)
        self._spilled = spilled(self._blocks, size, self._limit)
        if self._spilled:
            self._make_room(-(-size // SECTOR) * SECTOR)

    def _make_room(self, size: int) -> None:
        if self._buffers and len(self._buffers[0]) == size:
            return
        self._buffers = [aligned(size, torch.uint8) for _ in range(STAGED)]
        if self._file is not None:
            self._file.close()
        self._path.unlink(missing_ok=True)
        self._file = DirectFile(self._path, self._blocks * size, create=True)

    def _free_buffer(self, number: int) -> Tensor:
        before = self._moves.pop(number % STAGED, None)
        if before is not None:
            before.result()
        return self._buffers[number % STAGED]

    def _read(self, number: int) -> None:
        if self._reading == number:
            return
        buffer = self._free_buffer(number)
        assert self._file is not None
        self._moves[number % STAGED] = self._thread.submit(self._file.read, buffer, number * len(buffer))
        self._reading = number
        self.bytes_moved += len(buffer)

    def _views(self, buffer: Tensor, like: Tensor) -> list[Tensor]:
        flat = buffer[: len(buffer) // like.element_size() * like.element_size()].view(like.dtype)
        counts = [shape.numel() for shape in self._shapes]
        parts = flat[: sum(counts)].split(counts)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
