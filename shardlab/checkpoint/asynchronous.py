"""Saving beside the training: a snapshot in host memory, and a thread that writes it.

The thread only computes and writes. Agreement between the ranks happens in `poll`, which the training calls after each
step: so every rank learns of success or failure at the same step, no collective runs beside the training's, and a rank
that dies leaves no thread waiting in one. It costs one reduction of a number per step while a save is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardlab.checkpoint.layout import Part, parts_of
from shardlab.checkpoint.ranks import Agreement
from shardlab.checkpoint.save import Contents, Course, Draft, Fragments, Saver


class AsyncSaver:
    """Saves as `saver` does, in the background. All methods are collective.

    Host memory: a copy of what this rank writes, kept from one save to the next.
    """

    def __init__(self, saver: Saver):
        self._saver = saver
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: dict[Part, Tensor] = {}
        self._course: Course | None = None
        self._job: Future[Any] | None = None

    def save(self, contents: Contents, fragments: Fragments) -> Path | None:
        """Take a snapshot, after waiting for the save before; return that one's directory. Raises what it failed of."""
        before = self.wait()
        draft = self._saver.begin(contents, fragments)
        with self._saver.abandoned_on_error(draft.partial), Agreement[None](self._saver.ranks):
            self._snapshot(draft, fragments)
        self._course = self._saver.course(draft, self._copies.items())
        self._start(next(self._course))
        return before

    def poll(self) -> Path | None:
        """After each step: the directory of a save that is done since the last call. Raises what it failed of."""
        if self._job is None or not self._saver.ranks.all(self._job.done()):
            return None
        return self._next()

    def wait(self) -> Path | None:
        """Like `poll`, but wait until the save is done."""
        path = None
        while self._job is not None:
            wait([self._job])
            path = self._next()
        return path

    def close(self) -> None:
        """Wait and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._copies.clear()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._thread.shutdown(wait=False)  # the peers may be gone: nothing collective

    def _next(self) -> Path | None:
        """Agree on the job that is done on every rank, and start the next one."""
        job, course = self._job, self._course
        assert job is not None
        assert course is not None
        self._job = None
        try:
            with Agreement[Any](self._saver.ranks) as agreed:
                agreed.value = job.result()
        except Exception as error:
            course.throw(error)
            raise
        try:
            self._start(course.send(agreed.values))
        except StopIteration as end:
            path: Path = end.value
            return path
        return None

    def _start(self, job: Callable[[], Any]) -> None:
        self._job = self._thread.submit(job)

    def _snapshot(self, draft: Draft, fragments: Fragments) -> None:
        """Copy this rank's parts to the host, into last time's memory where it fits."""
        wanted = {part for plan in draft.plans for part in plan.parts}
        self._copies = {part: copy for part, copy in self._copies.items() if part in wanted}
        copies: dict[Part, Tensor] = {}
        device = None
        for part, data in parts_of(fragments(), self._saver.file_bytes):
            if part not in wanted or part in copies:
                continue
            copy = self._copies.get(part)
            if copy is None:
                # Pinned memory is what a copy from an accelerator can go to without waiting for each.
                copy = torch.empty(part.box.lengths, dtype=data.dtype, pin_memory=data.is_cuda)
            copies[part] = copy.copy_(data, non_blocking=True)
            device = data.device if data.device.type != "cpu" else device
        if device is not None:
            torch.accelerator.synchronize(device)
        self._copies = copies
