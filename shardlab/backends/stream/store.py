"""The training state in files: generations, so that a crash at any moment leaves a whole state.

Of each segment there are a state file (masters, then each of the optimizer's moments), a gradient file, and, where it
has frozen tensors, a file of those. A state file is never overwritten while the record names it: an updated segment
goes to a spare file of its size, which is synced, then named by the record, and the file before becomes the spare. A
gradient file is overwritten only after its update is applied, by the record. So there is no journal, and beside the
state itself only one spare file for each size of segment.
"""

import fcntl
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlab.backends.stream.direct import DirectFile
from shardlab.backends.stream.encoding import Format
from shardlab.backends.stream.layout import Layout
from shardlab.backends.stream.record import Pending, Record, RecordFile
from shardlab.errors import UserError

RECORD, LOCK, IDENTITY = "record", "lock", "identity.json"


def disk_bytes(form: Format, layout: Layout) -> int:
    """Of all files, spare ones included."""
    sizes = [form.state_bytes(segment.trained) for segment in layout.segments]
    others = (form.gradient.size(s.trained) + s.frozen * form.frozen.itemsize for s in layout.segments)
    return sum(sizes) + sum(set(sizes)) + sum(others)


class Store:
    """The files of one run. One process at a time has them open.

    `segment.trained` and `segment.frozen` say what there is of a segment; planes lie one after another in a file.
    """

    def __init__(self, directory: Path, layout: Layout, form: Format, identity: Mapping[str, Any], *, resume: bool):
        """Make new files in `directory`, or with `resume` open those that a run of the same `identity` left there.

        Raises UserError where the directory is in use or holds another state, where the disk is too small, and where
        there is nothing whole to resume.
        """
        self.directory = directory
        self.layout = layout
        self.form = form
        self._identity = json.loads(json.dumps(identity))
        self._guard = threading.Lock()  # of the record: an update is committed beside the main thread
        self._files: list[DirectFile] = []
        self._made = not directory.exists()
        self._lock = _lock(directory)
        self._closed = False
        try:
            self.resumed = resume
            if resume:
                self._reopen()
            else:
                self._create()
        except BaseException:
            self.close(remove=self._ours)
            raise

    _ours = False  # whether what lies in the directory was put there by this object

    def _create(self) -> None:
        left = sorted(set(os.listdir(self.directory)) - {LOCK})
        if left:
            raise UserError(
                f"{self.directory} is not empty (it holds {left[0]}): the state of another run would be overwritten; "
                "remove it, or choose another shard.stream_directory"
            )
        needed, free = disk_bytes(self.form, self.layout), shutil.disk_usage(self.directory).free
        if needed > free:
            raise UserError(
                f"disk full: the training state needs {needed / 2**30:.2f} GiB in {self.directory}, which has "
                f"{free / 2**30:.2f} GiB free; make room, or choose another shard.stream_directory"
            )
        self._ours = True
        (self.directory / IDENTITY).write_text(json.dumps(self._identity))
        self._open_files(create=True)
        count = len(self.layout.segments)
        self._record = Record(tuple(range(count)), (0,) * count)
        self._spare = self._spares()

    def _reopen(self) -> None:
        if not (self.directory / RECORD).exists():
            raise UserError(f"{self.directory} holds no training state to go on from")
        try:
            found = json.loads((self.directory / IDENTITY).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.directory / IDENTITY} can't be read: {error}") from error
        if found != self._identity:
            unlike = sorted(key for key in self._identity | found if found.get(key) != self._identity.get(key))
            raise UserError(
                f"{self.directory} holds the training state of another run (its {unlike[0]} is not this one's); remove "
                "it, or choose another shard.stream_directory"
            )
        self._open_files(create=False)
        self._record = self._record_file.read()
        self._spare = self._spares()

    def _open_files(self, *, create: bool) -> None:
        """State files by number: first one for each segment, then a spare of each size."""
        segments = self.layout.segments
        sizes = [self.form.state_bytes(segment.trained) for segment in segments]
        self._sizes = [*sizes, *sorted(set(sizes))]
        self._states = [self._open(f"state-{i:05d}", size, create) for i, size in enumerate(self._sizes)]
        width, each = self.form.frozen.itemsize, self.form.gradient
        self._gradients = [self._open(f"gradient-{s.index:05d}", each.size(s.trained), create) for s in segments]
        self._frozen = [self._open(f"frozen-{s.index:05d}", s.frozen * width, create) for s in segments]
        self._record_file = RecordFile(self.directory / RECORD, create=create)

    def _open(self, name: str, size: int, create: bool) -> DirectFile | None:
        if not size:
            return None
        file = DirectFile(self.directory / name, size, create=create)
        self._files.append(file)
        return file

    def _spares(self) -> dict[int, int]:
        """By size, the number of the file that the record does not name."""
        unnamed: dict[int, list[int]] = defaultdict(list)
        for number, size in enumerate(self._sizes):
            if number not in self._record.files:
                unnamed[size].append(number)
        return {size: numbers[0] for size, numbers in unnamed.items()}

    @property
    def record(self) -> Record:
        """The committed state."""
        with self._guard:
            return self._record

    def has_pending(self, segment: int) -> bool:
        """Whether an update waits for the segment."""
        record = self.record
        return self.layout.segments[segment].trained > 0 and record.applied[segment] < record.updates

    def state(self, segment: int) -> DirectFile:
        """The segment's state, by the record."""
        return _there(self._states[self.record.files[segment]])

    def spare(self, segment: int) -> DirectFile:
        """Where the segment's updated state is to be written."""
        return _there(self._states[self._spare[self.form.state_bytes(self.layout.segments[segment].trained)]])

    def gradient(self, segment: int) -> DirectFile:
        """The segment's gradient: the pending one, or the one of the window under way."""
        return _there(self._gradients[segment])

    def frozen(self, segment: int) -> DirectFile:
        """Values of what is not trained."""
        return _there(self._frozen[segment])

    def begin(self, note: Mapping[str, Any]) -> None:
        """Commit the first state, when every state file has been written and synced."""
        with self._guard:
            if self._record.windows:
                raise RuntimeError("a state can't be taken over after the first window")
            self._commit(self._record, note)
            descriptor = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # the names of the new files
            finally:
                os.close(descriptor)

    def commit_update(self, segment: int) -> None:
        """The spare file, written and synced, is the segment's state from here on."""
        size = self.form.state_bytes(self.layout.segments[segment].trained)
        with self._guard:
            before, after = self._record.files[segment], self._spare[size]
            self._commit(self._record.moved(segment, after))
            self._spare[size] = before

    def commit_window(self, pending: Pending | None, note: Mapping[str, Any]) -> None:
        """A window is over: its gradients, written and synced, wait; or with None it is to change nothing."""
        with self._guard:
            record = self._record
            if record.pending is not None and any(
                s.trained and record.applied[s.index] < record.updates for s in self.layout.segments
            ):
                raise RuntimeError("a window ended before the update of the one before was applied everywhere")
            done = replace(record, windows=record.windows + 1, updates=record.updates + (pending is not None))
            done = replace(done, pending=pending if pending is not None else record.pending)
            self._commit(done, note)

    def _commit(self, record: Record, note: Mapping[str, Any] | None = None) -> None:
        record = replace(record, sequence=self._record.sequence + 1)
        if note is not None:
            record = replace(record, note=dict(note))
        self._record_file.write(record)
        self._record = record

    def close(self, *, remove: bool) -> None:
        """Close the files; with `remove` they go, and the directory if it was made for them."""
        if self._closed:
            return
        self._closed = True
        for file in self._files:
            file.close()
        if hasattr(self, "_record_file"):
            self._record_file.close()
        if remove:
            for path in self.directory.iterdir():
                if _is_own(path):
                    path.unlink()
        left = set(os.listdir(self.directory)) - {LOCK}
        if not left:
            (self.directory / LOCK).unlink()
            if self._made or self.resumed:
                self.directory.rmdir()
        os.close(self._lock)


def remove_left_over(directory: Path) -> int:
    """Remove the files of a store whose process has ended; the bytes that they had.

    Raises UserError where the process lives. What is not a store's own stays.
    """
    if not directory.is_dir():
        return 0
    lock = _lock(directory)
    try:
        own = [path for path in directory.iterdir() if _is_own(path)]
        freed = sum(path.stat().st_blocks * 512 for path in own)
        for path in own:
            path.unlink()
        (directory / LOCK).unlink()
        if not os.listdir(directory):
            directory.rmdir()
    finally:
        os.close(lock)
    return freed


def _is_own(path: Path) -> bool:
    return path.name in (RECORD, IDENTITY) or path.name.split("-")[0] in _NAMES


_NAMES = ("state", "gradient", "frozen", "activations")


def _there(file: DirectFile | None) -> DirectFile:
    if file is None:
        raise RuntimeError("a segment without such tensors has no file of them")
    return file


def _lock(directory: Path) -> int:
    """The open lock file. Raises UserError where another process has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"shard.stream_directory: {directory} can't be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f"{directory} is in use by another job: choose another shard.stream_directory") from error
    return descriptor
