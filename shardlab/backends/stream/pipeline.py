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

from shardlab.backends.stream.buffers import Buffer
from shardlab.backends.stream.direct import DirectFile
from shardlab.backends.stream.encoding import LEAST_PIECE
from shardlab.backends.stream.layout import Part, Segment, overlaps, pieces
from shardlab.backends.stream.store import Store
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
        if piece % LEAST_PIECE:
            raise ValueError(f"pieces are multiples of {LEAST_PIECE} elements, not {piece}")
        self._piece = min(piece, max(self._layout.largest, 1))
        self.traffic = Traffic()
        self.changed: dict[str, bool] | None = None  # where it is a dict: whether an update changed each tensor
        self._slots = [torch.empty(self._layout.largest, dtype=dtype, device=device) for _ in range(SLOTS)]
        flats = [torch.empty(self._layout.largest_trained, device=device) for _ in range(GRADIENTS)]
        self._gradients = {flat.data_ptr(): flat for flat in flats}
        self._free_gradients: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for flat in flats:
            self._free_gradients.put(flat)
        self._buffers: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(WORKERS):
            self._buffers.put(Buffer(store.form, self._piece))
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
        with self._buffer() as buffer:
            if not trained:
                file, form = self._store.frozen(segment.index), self._store.form.frozen
                for start, stop in pieces(elements, self._piece):
                    plane = buffer.numbers(stop - start, form).zero_()
                    give(start, stop, [plane])
                    self._write(file, plane, start * form.itemsize)
            else:
                file = self._store.state(segment.index)
                for start, stop in pieces(elements, self._piece):
                    planes = [torch.zeros(stop - start) for _ in self._store.form.planes]
                    give(start, stop, planes)
                    piece = buffer.state(stop - start)
                    for chunk in piece.chunks():
                        piece.encode(chunk, [plane[chunk] for plane in planes], nearest=True)
                    self._write_state(file, segment, start, piece.fields)
            file.sync()

    def copy_out(self, segment: Segment, part: Part, into: Tensor, plane: int = 0) -> None:
        """Read the values of `part`, (its elements,), or of another of its planes, into `into`, of any type."""
        elements = segment.trained if part.trained else segment.frozen
        end = part.offset + part.numel
        with self._buffer() as buffer:
            for start, stop in pieces(elements, self._piece):
                first, last = max(start, part.offset), min(stop, end)
                if first >= last:
                    continue
                target = into[first - part.offset : last - part.offset]
                if not part.trained:
                    values = buffer.numbers(stop - start, self._store.form.frozen)
                    self._read(self._store.frozen(segment.index), values, start * values.itemsize)
                    target.copy_(values[first - start : last - start])
                    continue
                piece = buffer.state(stop - start)
                self._read_state(self._store.state(segment.index), segment, start, piece.fields, only=plane)
                for chunk in piece.chunks():
                    low, high = max(first - start, chunk.start), min(last - start, chunk.stop)
                    if low < high:
                        values = piece.decode_plane(plane, chunk)[low - chunk.start : high - chunk.start]
                        target[low + start - first : high + start - first].copy_(values)

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
                form = store.form.master
                tasks.append(self._workers.submit(self._read_piece, store.state(segment.index), start, target, form))
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
        file, form = self._store.gradient(segment.index), self._store.form.gradient.dtype
        _results(
            [
                self._workers.submit(self._read_piece, file, start, flat[start:stop], form)
                for start, stop in pieces(segment.trained, self._piece)
            ]
        )

    def _write_gradient(self, segment: Segment, flat: Tensor) -> None:
        file, form = self._store.gradient(segment.index), self._store.form.gradient.dtype
        try:
            _results(
                [
                    self._workers.submit(self._write_piece, file, start, flat[start:stop], form)
                    for start, stop in pieces(segment.trained, self._piece)
                ]
            )
            file.sync()
        finally:
            self.release(flat)

    # --- in the workers

    def _update_piece(self, segment: Segment, start: int, stop: int, target: Tensor | None) -> None:
        store = self._store
        record = store.record
        if record.pending is None:
            raise RuntimeError("an update waits that the record does not know")
        with self._buffer() as buffer:
            piece = buffer.state(stop - start)
            self._read_state(store.state(segment.index), segment, start, piece.fields)
            self._read(store.gradient(segment.index), piece.gradient, start * store.form.gradient.dtype.itemsize)
            # Chance is a function of what is updated, so that a run that goes on rounds as it would have.
            buffer.scratch.generator.manual_seed((record.updates << 40) + (segment.index << 20) + start // self._piece)
            for chunk in piece.chunks():
                planes = piece.decode(chunk)
                begin = start + chunk.start
                before = planes[0].clone() if self.changed is not None else None
                self._update.apply(segment, begin, planes, piece.gradients(chunk), record.pending, record.updates)
                if before is not None:
                    self._note_changes(segment, begin, start + chunk.stop, before, planes[0])
                piece.encode(chunk, planes)
                if target is not None:
                    target[chunk].copy_(piece.masters(chunk))
            self._write_state(store.spare(segment.index), segment, start, piece.fields)

    def _note_changes(self, segment: Segment, start: int, stop: int, before: Tensor, after: Tensor) -> None:
        for part, where, _ in overlaps(segment, start, stop, trained=True):
            moved = not torch.equal(before[where], after[where])
            with self._counting:
                if self.changed is not None:
                    self.changed[part.name] = self.changed.get(part.name, False) or moved

    def _read_piece(self, file: DirectFile, start: int, target: Tensor, form: torch.dtype) -> None:
        with self._buffer() as buffer:
            piece = buffer.numbers(target.numel(), form)
            self._read(file, piece, start * form.itemsize)
            target.copy_(piece)

    def _write_piece(self, file: DirectFile, start: int, source: Tensor, form: torch.dtype) -> None:
        with self._buffer() as buffer:
            piece = buffer.numbers(source.numel(), form)
            piece.copy_(source)
            self._write(file, piece, start * form.itemsize)

    @contextmanager
    def _buffer(self) -> Iterator[Buffer]:
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def _read_state(
        self, file: DirectFile, segment: Segment, start: int, fields: list[Tensor], only: int | None = None
    ) -> None:
        """Fill `fields` with those of the piece of `segment` from element `start` on, or of one plane alone."""
        for (number, offset, one), data in zip(self._store.form.places(segment.trained), fields, strict=True):
            if only in (None, number):
                self._read(file, data, offset + one.count(start) * one.dtype.itemsize)

    def _write_state(self, file: DirectFile, segment: Segment, start: int, fields: list[Tensor]) -> None:
        for (_, offset, one), data in zip(self._store.form.places(segment.trained), fields, strict=True):
            self._write(file, data, offset + one.count(start) * one.dtype.itemsize)

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
