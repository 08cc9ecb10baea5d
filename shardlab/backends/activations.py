"""What the blocks save for their backward pass, between forward and backward pass on the host or in a file.

A forward pass of a block is a shelf (see `model.saved`). Shelves are written while later ones are filled. They come
back in the reverse order, or in one that is said (`follows`): while the block of one runs backward the next is read.
"""

import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from shardlab.backends.base import Job
from shardlab.backends.placement import AHEAD, PIECE, STAGED
from shardlab.backends.stream.direct import SECTOR, UnnamedFile, aligned
from shardlab.errors import UserError

ALIGN = 64  # bytes; what one vector register takes at the most
_THREADS = 2  # each for writing and for reading: one alone does not fill a disk's queue


class HostShelf:
    """Of an accelerator: pinned memory on the host, sent and fetched on a stream of its own."""

    def __init__(self, shelves: "HostShelves"):
        self._shelves = shelves
        self._there: list[Tensor] = []
        self._back: list[Tensor] | None = None
        self._arrived: Any = None

    def put(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        """See `Shelf.put`."""
        source, stream = _bytes(storage, device), self._shelves.stream
        there = torch.empty(len(source), dtype=torch.uint8, pin_memory=stream is not None)
        if stream is None:
            there.copy_(source)
        else:
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                there.copy_(source, non_blocking=True)
            source.record_stream(stream)
        self._there.append(there)
        return len(self._there) - 1

    def end(self) -> None:
        """See `Shelf.end`."""

    def get(self, number: int) -> Tensor:
        """See `Shelf.get`."""
        self._shelves.use(self)
        assert self._back is not None
        return self._back[number]

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._back is not None:
            return
        stream, device = self._shelves.stream, self._shelves.device
        if stream is None:
            self._back = [one.to(device) for one in self._there]
            return
        # Its memory is of the stream that computes, which may have had other uses for it until now.
        self._back = [torch.empty(len(one), dtype=torch.uint8, device=device) for one in self._there]
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            for back, there in zip(self._back, self._there, strict=True):
                back.copy_(there, non_blocking=True)
                back.record_stream(stream)
        self._arrived = stream.record_event()

    def arrive(self) -> None:
        """Let what computes wait until it is there."""
        if self._arrived is not None:
            torch.accelerator.current_stream().wait_event(self._arrived)

    def leave(self) -> None:
        """Its block's backward pass is over."""
        self._back, self._arrived = None, None


class DiskShelf:
    """A region of the file."""

    def __init__(self, shelves: "DiskShelves", start: int):
        self._shelves = shelves
        self._places: list[tuple[int, int]] = []  # begin and end of each memory, from `start` on
        self._filled = 0
        self._piece: Tensor | None = None
        self.start = start
        self.writes: list[Future[None]] = []
        self.follows: weakref.ref[DiskShelf] | None = None  # what is asked for after it, where that was said

    @property
    def size(self) -> int:
        """Bytes of the region, whole sectors once the forward pass is over."""
        return -(-self._filled // SECTOR) * SECTOR

    def put(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        """See `Shelf.put`."""
        source, done = _bytes(storage, device), 0
        self._places.append((self._filled, self._filled + len(source)))
        while done < len(source):
            if self._piece is None:
                self._piece = self._shelves.piece()
            used = self._filled % PIECE
            part = min(len(source) - done, PIECE - used)
            self._piece[used : used + part].copy_(source[done : done + part])
            done += part
            self._filled += part
            if self._filled % PIECE == 0:
                self._write(PIECE)
        self._filled += -self._filled % ALIGN
        if self._piece is not None and self._filled % PIECE == 0:
            self._write(PIECE)
        return len(self._places) - 1

    def end(self) -> None:
        """See `Shelf.end`."""
        if self._piece is not None:
            self._write(-(-(self._filled % PIECE) // SECTOR) * SECTOR)

    def _write(self, size: int) -> None:
        assert self._piece is not None
        begin = (self._filled - 1) // PIECE * PIECE
        self.writes.append(self._shelves.write(self._piece, size, self.start + begin))
        self._piece = None

    def get(self, number: int) -> Tensor:
        """See `Shelf.get`."""
        begin, end = self._places[number]
        return self._shelves.use(self)[begin:end].to(self._shelves.device)


class _Stack:
    """The shelves that are in use, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []

    def add(self, shelf: Any) -> None:
        self._made.append(weakref.ref(shelf))

    def last(self) -> Any:
        """None where there is none."""
        while self._made and self._made[-1]() is None:
            self._made.pop()
        return self._made[-1]() if self._made else None

    def before(self, shelf: Any) -> Any:
        """The one that was made before; None where it is gone."""
        self.last()
        for index in range(len(self._made) - 1, 0, -1):
            if self._made[index]() is shelf:
                return self._made[index - 1]()
        return None


class HostShelves:
    """Shelves on the host of an accelerator."""

    def __init__(self, device: torch.device):
        self.device = device
        # On a CPU, where only tests use it, there is nothing to overlap.
        self.stream: Any = torch.Stream(device) if device.type != "cpu" else None
        self._stack = _Stack()
        self._current: weakref.ref[HostShelf] | None = None

    def begin(self) -> HostShelf:
        """See `Shelves.begin`."""
        shelf = HostShelf(self)
        self._stack.add(shelf)
        return shelf

    def use(self, shelf: HostShelf) -> None:
        """`shelf` is the one whose block runs backward now."""
        current = self._current() if self._current is not None else None
        if current is shelf:
            return
        if current is not None:
            current.leave()
        self._current = weakref.ref(shelf)
        shelf.fetch()
        shelf.arrive()
        before = self._stack.before(shelf)
        if before is not None:
            before.fetch()

    def close(self) -> None:
        """Nothing is left behind."""


class DiskShelves:
    """Shelves in one file, of at most `limit` bytes, in `directory`."""

    def __init__(self, directory: Path, device: torch.device, limit: int | None = None):
        """Raises UserError where the file can't be made."""
        self.device = device
        self._limit = limit
        self._file = UnnamedFile(directory)
        self._stack = _Stack()
        self._pieces: SimpleQueue[Tensor] = SimpleQueue()
        self._made = 0  # of the pieces
        self._writers = ThreadPoolExecutor(_THREADS, thread_name_prefix="activations-write")
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="activations-read")
        self._writes: list[Future[None]] = []
        self._newest: Callable[[], DiskShelf | None] = lambda: None
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(AHEAD)]
        self._reads: list[list[Future[None]]] = [[] for _ in range(AHEAD)]
        self._owners: list[weakref.ref[DiskShelf] | None] = [None] * AHEAD
        self._current = 0  # the buffer in use
        self.bytes_moved = 0

    def begin(self) -> DiskShelf:
        """See `Shelves.begin`."""
        last = self._stack.last()
        if last is None or last is not self._newest():
            self._finish()  # the regions of shelves that are gone are written to anew
        shelf = DiskShelf(self, last.start + last.size if last is not None else 0)
        self._stack.add(shelf)
        self._newest = weakref.ref(shelf)
        return shelf

    def last(self) -> DiskShelf | None:
        """The one that was made last."""
        found: DiskShelf | None = self._stack.last()
        return found

    def _finish(self) -> None:
        wait(list(chain(self._writes, *self._reads)))
        for write in self._writes:
            write.result()
        self._writes.clear()

    def piece(self) -> Tensor:
        """A free piece of memory; waits for the disk where all are on their way."""
        if self._made < STAGED and self._pieces.empty():
            self._made += 1
            return aligned(PIECE, torch.uint8)
        return self._pieces.get()

    def write(self, piece: Tensor, size: int, offset: int) -> "Future[None]":
        """Write the first `size` bytes of a piece, which is free afterwards. Raises UserError beyond the limit."""
        if self._limit is not None and offset + size > self._limit:
            self._pieces.put(piece)
            raise UserError(
                f"shard.offload.disk_limit is {self._limit / 2**30:.3g} GiB, and what the blocks save takes more: "
                "raise it, or set shard.micro_batch lower or shard.recompute=full"
            )
        self._file.grow(offset + size)
        self.bytes_moved += size
        future = self._writers.submit(self._write, piece, size, offset)
        self._writes.append(future)
        return future

    def _write(self, piece: Tensor, size: int, offset: int) -> None:
        try:
            self._file.write(piece[:size], offset)
        finally:
            self._pieces.put(piece)

    def use(self, shelf: DiskShelf) -> Tensor:
        """All bytes of `shelf`, whose block runs backward now; the next is asked for."""
        if self._owner(self._current) is not shelf:
            self._current = self.load(shelf)
            for read in self._reads[self._current]:
                read.result()
            after = shelf.follows() if shelf.follows is not None else self._stack.before(shelf)
            if after is not None:
                self.load(after)
        return self._buffers[self._current]

    def load(self, shelf: DiskShelf) -> int:
        """Begin to read `shelf` into the buffer that is not in use; its number."""
        for number in range(AHEAD):
            if self._owner(number) is shelf:
                return number
        number = (self._current + 1) % AHEAD
        wait(self._reads[number])
        if len(self._buffers[number]) < shelf.size:
            self._buffers[number] = aligned(shelf.size, torch.uint8)
        buffer, writes = self._buffers[number], list(shelf.writes)
        self._owners[number] = weakref.ref(shelf)
        self._reads[number] = [
            self._readers.submit(
                self._read, buffer[begin : min(begin + PIECE, shelf.size)], shelf.start + begin, writes
            )
            for begin in range(0, shelf.size, PIECE)
        ]
        self.bytes_moved += shelf.size
        return number

    def _owner(self, number: int) -> DiskShelf | None:
        owner = self._owners[number]
        return owner() if owner is not None else None

    def _read(self, into: Tensor, offset: int, writes: "list[Future[None]]") -> None:
        for one in writes:
            one.result()
        self._file.read(into, offset)

    def close(self) -> None:
        """End the threads; the file goes."""
        self._writers.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._file.close()


def keep_elsewhere(job: Job) -> HostShelves | DiskShelves | None:
    """Let the job's blocks keep what they save where its plan says; None: where it is made.

    Raises UserError for the host where that is what computes.
    """
    offload, device = job.plan.offload, torch.device(job.topology.device)
    if offload.activations == "none":
        return None
    if offload.activations == "cpu" and device.type == "cpu":
        raise UserError(
            "shard.offload.activations cpu moves nothing where a CPU computes, for it is the same memory: set it to "
            "disk, or to none"
        )
    shelves = (
        HostShelves(device) if offload.activations == "cpu" else DiskShelves(where(job), device, offload.disk_limit)
    )
    job.module.set_shelves(shelves)
    return shelves


def where(job: Job) -> Path:
    """The directory of what goes to the disk."""
    return job.directory if job.directory is not None else Path(tempfile.gettempdir())


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """All of it, (bytes,), not copied."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
