"""What moves between disk and memory, beside the computing: read-ahead, updates, write-behind.

Weights come into slots, one segment each, in an order known beforehand; while one computes the next is loaded.
Loading a segment for which an update waits applies it on the way: piece by piece masters, moments and gradient are
read, updated and written to the segment's spare file, and the new values go into the slot. So the optimizer's state is
never in memory but for a few pieces. Gradients leave through two buffers in the same manner.

Threads: one loads segments one after another, one writes gradients, and both hand pieces to a few workers, which do
all reading, writing and updating on buffers of their own. None of them touches the model.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.backends.stream.direct import DirectFile, aligned
from shardlab.backends.stream.layout import PAD, Part, Segment, overlaps, pieces
from shardlab.backends.stream.store import FP32, Store
from shardlab.backends.stream.update import Update

WORKERS = 3  # reads in flight: one alone does not fill a disk's queue
PIECE = 1024 * 1024  # elements of a plane that a worker moves at a time
SLOTS = 2  # segments whose weights are in memory: the one that computes, and the next
GRADIENTS = 2  # segments whose gradients are in memory: the one that computes, and the one being written


@dataclass
class Traffic:
    """Bytes moved, and seconds that computing waited for them."""

    read: int = 0
    written: int = 0
    waited_seconds: float = 0.0


class Pipeline:
    """Loads segments of `store` into slots on `device`, in `dtype`, and takes their gradients."""

    def __init__(self, store: Store, update: Update, device: torch.device, dtype: torch.dtype, *, piece: int = PIECE):
        self._store = store
        self._layout = store.layout
        self._update = update
        self._piece = min(piece, max(self._layout.largest, 1))
        self._planes = 1 + store.form.states
        self.traffic = Traffic()
        self.changed: dict[str, bool] | None = None  # where it is a dict: whether an update changed each tensor
        self._slots = [torch.empty(self._layout.largest, dtype=dtype, device=device) for _ in range(SLOTS)]
        flats = [torch.empty(self._layout.largest_trained, device=device) for _ in range(GRADIENTS)]
        self._gradients = {flat.data_ptr(): flat for flat in flats}
        self._free_gradients: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for flat in flats:
            self._free_gradients.put(flat)
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(WORKERS):
            self._buffers.put(aligned((self._planes + 1) * self._piece))
        self._counting = threading.Lock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="stream-load")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stream-write")
        self._workers = _single_threaded(WORKERS)
        self._written: list[Future[None]] = []

    def visits(self, order: Sequence[int]) -> Iterator[tuple[Segment, Tensor]]:
        """Each segment of `order` with its weights, updates applied; they are valid until the next is asked for."""
        coming: deque[tuple[Segment, Tensor, Future[None]]] = deque()
        left, free = iter(order), list(self._slots)

        def load_ahead() -> None:
            while free:
                index = next(left, None)
                if index is None:
                    return
                segment, slot = self._layout.segments[index], free.pop()
                coming.append((segment, slot, self._loader.submit(self._load, segment, slot)))

        try:
            load_ahead()
            while coming:
                segment, slot, future = coming.popleft()
                self._wait(future)
                yield segment, slot[: segment.elements]
                free.append(slot)
                load_ahead()
        finally:
            for _, _, future in coming:
                future.cancel()
            wait([future for _, _, future in coming])

    def apply_pending(self) -> None:
        """Apply what waits, without computing: afterwards the files hold the weights as they are."""
        for segment in self._layout.segments:
            if self._store.has_pending(segment.index):
                self._wait(self._loader.submit(self._load, segment, None))

    def gradient(self, segment: Segment, *, stored: bool = False) -> Tensor:
        """A buffer for the segment's gradient (trained elements,), fp32: zeros, or what was written in this window."""
        with self._waiting():
            flat = self._free_gradients.get()[: segment.trained]
        if not stored:
            return flat.zero_()
        for future in self._written:
            self._wait(future)
        self._wait(self._loader.submit(self._read_gradient, segment, flat))
        return flat

    def put_gradient(self, segment: Segment, flat: Tensor) -> None:
        """Write the segment's gradient; `flat`, a buffer of ours or another, is not to be touched afterwards."""
        self._written.append(self._writer.submit(self._write_gradient, segment, flat))

    def release(self, flat: Tensor) -> None:
        """Give a gradient's buffer back unwritten."""
        ours = self._gradients.get(flat.data_ptr())
        if ours is not None:
            self._free_gradients.put(ours)

    def finish_gradients(self) -> None:
        """Wait until all of them are on the disk."""
        for future in self._written:
            self._wait(future)
        self._written.clear()

    def fill(self, segment: Segment, give: Callable[[int, int, list[Tensor]], None], *, trained: bool) -> None:
        """Write one of the segment's planes (with its states): `give(start, stop, planes)` fills each piece."""
        elements = segment.trained if trained else segment.frozen
        if not elements:
            return
        file = self._store.state(segment.index) if trained else self._store.frozen(segment.index)
        form = torch.float32 if trained else self._store.form.frozen
        buffer = self._buffers.get()
        try:
            for start, stop in pieces(elements, self._piece):
                planes = self._views(buffer, stop - start, form)[: self._planes if trained else 1]
                for plane in planes:
                    plane.zero_()
                give(start, stop, planes)
                for number, plane in enumerate(planes):
                    self._write(file, plane, (number * elements + start) * form.itemsize)
            file.sync()
        finally:
            self._buffers.put(buffer)

    def copy_out(self, segment: Segment, part: Part, into: Tensor) -> None:
        """Read the values of `part`, (its elements,), into `into`, of any type."""
        file = self._store.state(segment.index) if part.trained else self._store.frozen(segment.index)
        form = torch.float32 if part.trained else self._store.form.frozen
        first, last = part.offset // PAD * PAD, -(-(part.offset + part.numel) // PAD) * PAD
        buffer = self._buffers.get()
        try:
            for start, stop in pieces(last - first, self._piece):
                plane = self._views(buffer, stop - start, form)[0]
                self._read(file, plane, (first + start) * form.itemsize)
                begin, end = max(first + start, part.offset), min(first + stop, part.offset + part.numel)
                into[begin - part.offset : end - part.offset] = plane[begin - first - start : end - first - start]
        finally:
            self._buffers.put(buffer)

    def close(self) -> None:
        """End the threads; what they were asked for is done before."""
        for pool in (self._loader, self._writer, self._workers):
            pool.shutdown(wait=True)

    # --- in the loading and the writing thread

    def _load(self, segment: Segment, slot: Tensor | None) -> None:
        store = self._store
        updating = store.has_pending(segment.index)
        tasks: list[Future[None]] = []
        for start, stop in pieces(segment.trained, self._piece):
            target = slot[start:stop] if slot is not None else None
            if updating:
                tasks.append(self._workers.submit(self._update_piece, segment, start, stop, target))
            elif target is not None:
                tasks.append(self._workers.submit(self._read_piece, store.state(segment.index), start, target))
        if slot is not None and segment.frozen:
            for start, stop in pieces(segment.frozen, self._piece):
                target = slot[segment.trained + start : segment.trained + stop]
                form = store.form.frozen
                tasks.append(self._workers.submit(self._read_piece, store.frozen(segment.index), start, target, form))
        _results(tasks)
        if updating:
            store.spare(segment.index).sync()
            store.commit_update(segment.index)

    def _read_gradient(self, segment: Segment, flat: Tensor) -> None:
        file = self._store.gradient(segment.index)
        _results(
            [
                self._workers.submit(self._read_piece, file, start, flat[start:stop])
                for start, stop in pieces(segment.trained, self._piece)
            ]
        )

    def _write_gradient(self, segment: Segment, flat: Tensor) -> None:
        file = self._store.gradient(segment.index)
        try:
            _results(
                [
                    self._workers.submit(self._write_piece, file, start, flat[start:stop])
                    for start, stop in pieces(segment.trained, self._piece)
                ]
            )
            file.sync()
        finally:
            self.release(flat)

    # --- in the workers

    def _update_piece(self, segment: Segment, start: int, stop: int, target: Tensor | None) -> None:
        store, buffer = self._store, self._buffers.get()
        try:
            *planes, gradient = self._views(buffer, stop - start, torch.float32)
            source, spare = store.state(segment.index), store.spare(segment.index)
            for number, plane in enumerate(planes):
                self._read(source, plane, (number * segment.trained + start) * FP32)
            self._read(store.gradient(segment.index), gradient, start * FP32)
            record = store.record
            if record.pending is None:
                raise RuntimeError("an update waits that the record does not know")
            before = planes[0].clone() if self.changed is not None else None
            self._update.apply(segment, start, planes, gradient, record.pending, record.updates)
            if before is not None:
                self._note_changes(segment, start, stop, before, planes[0])
            for number, plane in enumerate(planes):
                self._write(spare, plane, (number * segment.trained + start) * FP32)
            if target is not None:
                target.copy_(planes[0])
        finally:
            self._buffers.put(buffer)

    def _note_changes(self, segment: Segment, start: int, stop: int, before: Tensor, after: Tensor) -> None:
        for part, where, _ in overlaps(segment, start, stop, trained=True):
            moved = not torch.equal(before[where], after[where])
            with self._counting:
                if self.changed is not None:
                    self.changed[part.name] = self.changed.get(part.name, False) or moved

    def _read_piece(self, file: DirectFile, start: int, target: Tensor, form: torch.dtype = torch.float32) -> None:
        buffer = self._buffers.get()
        try:
            piece = self._views(buffer, target.numel(), form)[0]
            self._read(file, piece, start * form.itemsize)
            target.copy_(piece)
        finally:
            self._buffers.put(buffer)

    def _write_piece(self, file: DirectFile, start: int, source: Tensor) -> None:
        buffer = self._buffers.get()
        try:
            piece = self._views(buffer, source.numel(), torch.float32)[0]
            piece.copy_(source)
            self._write(file, piece, start * FP32)
        finally:
            self._buffers.put(buffer)

    def _views(self, buffer: Tensor, elements: int, form: torch.dtype) -> list[Tensor]:
        """A buffer as pieces of as many planes as it has, each beginning at a page."""
        return [buffer[i * self._piece : (i + 1) * self._piece].view(form)[:elements] for i in range(self._planes + 1)]

    def _read(self, file: DirectFile, into: Tensor, offset: int) -> None:
        file.read(into, offset)
        with self._counting:
            self.traffic.read += into.numel() * into.element_size()

    def _write(self, file: DirectFile, data: Tensor, offset: int) -> None:
        file.write(data, offset)
        with self._counting:
            self.traffic.written += data.numel() * data.element_size()

    def _wait(self, future: Future[None]) -> None:
        with self._waiting():
            future.result()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.traffic.waited_seconds += time.perf_counter() - started


def _results(tasks: list[Future[None]]) -> None:
    """Wait for all of them, also where one fails: they use buffers that are handed on."""
    wait(tasks)
    for task in tasks:
        task.result()


def _single_threaded(count: int) -> ThreadPoolExecutor:
    """Workers whose kernels use one thread each: teams of threads beside the computing ones would stall both."""
    threads = torch.get_num_threads()
    ready = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="stream", initializer=lambda: torch.set_num_threads(1))
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)  # the number is each thread's own, but the last one set is what new threads get
    return pool
