"""The commit record: which file holds each segment's state, and what is still to be applied to it.

One small file of two slots that are written in turn, each with a sequence number and a hash. A crash while one is
written leaves the other, which is the record before.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from shardlab.errors import UserError

_HEAD = 64  # hash and length, in hexadecimal, then spaces
_SLOT = 4 * 1024**2  # bytes apart; what is not written takes no space


@dataclass(frozen=True)
class Pending:
    """An update that waits in the gradient files: its rate, and what the gradients are to be multiplied by."""

    lr: float
    scale: float | None


@dataclass(frozen=True)
class Record:
    """The committed state.

    `windows` were run, `updates` of them to be applied. `files[i]` is the number of the file with the state of segment
    i, to which `applied[i]` updates have been applied: all, or all but the pending one, whose gradient then lies in
    the segment's gradient file. `note` is the caller's, of the same window.
    """

    files: tuple[int, ...]
    applied: tuple[int, ...]
    windows: int = 0
    updates: int = 0
    pending: Pending | None = None
    sequence: int = 0
    note: dict[str, Any] = field(default_factory=dict)

    def moved(self, segment: int, file: int) -> "Record":
        """After the pending update of `segment` was written to `file`."""
        files = (*self.files[:segment], file, *self.files[segment + 1 :])
        applied = (*self.applied[:segment], self.updates, *self.applied[segment + 1 :])
        return replace(self, files=files, applied=applied)


class RecordFile:
    """The record on the disk."""

    def __init__(self, path: Path, *, create: bool):
        self._path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(path, flags, 0o600)

    def read(self) -> Record:
        """The newer whole one. Raises UserError where there is none."""
        found = [record for slot in (0, 1) if (record := self._read(slot)) is not None]
        if not found:
            raise UserError(f"{self._path} holds no whole record: remove {self._path.parent}; go on from a checkpoint")
        return max(found, key=lambda record: record.sequence)

    def write(self, record: Record) -> None:
        """On the disk when this returns."""
        body = json.dumps(asdict(record)).encode()
        head = f"{xxhash.xxh3_128_hexdigest(body)} {len(body):x}".encode().ljust(_HEAD)
        if len(head) + len(body) > _SLOT:
            raise RuntimeError(f"a record of {len(body)} bytes is too long for its slot of {_SLOT}")
        os.pwrite(self._descriptor, head + body, record.sequence % 2 * _SLOT)
        os.fdatasync(self._descriptor)

    def _read(self, slot: int) -> Record | None:
        head = os.pread(self._descriptor, _HEAD, slot * _SLOT)
        try:
            digest, length = head.decode().split()
            body = os.pread(self._descriptor, min(int(length, 16), _SLOT), slot * _SLOT + _HEAD)
        except ValueError:
            return None
        if xxhash.xxh3_128_hexdigest(body) != digest:
            return None
        values = json.loads(body)
        pending = values.pop("pending")
        values |= {"files": tuple(values["files"]), "applied": tuple(values["applied"])}
        return Record(**values, pending=Pending(**pending) if pending is not None else None)

    def close(self) -> None:
        """Close it; the record stays."""
        os.close(self._descriptor)
