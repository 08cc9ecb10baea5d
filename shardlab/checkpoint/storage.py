"""Where checkpoints lie: the few operations that saving and loading need, and the local file system's.

Another kind of storage (an object store) is another class with these methods. Nothing here follows a link inside a
checkpoint, waits on a pipe, or maps a file: mapped pages count as the process's memory while they are read.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import TracebackType
from typing import Protocol

from shardlab.errors import UserError


class Writer(Protocol):
    """A new file, written from its beginning to its end."""

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        ...

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        ...

    def close(self) -> None:
        """Give the file back; what is not synced may be lost."""
        ...


class Reader(Protocol):
    """A file opened for reading."""

    size: int

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` on; return the bytes read, fewer only at the file's end."""
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


class Storage(Protocol):
    """A tree of directories and files. All methods raise OSError as the operating system's calls do."""

    def names(self, directory: Path) -> list[str]:
        """What lies in `directory`, sorted; empty where it does not exist."""
        ...

    def is_directory(self, path: Path) -> bool:
        """Whether `path` is a directory itself, not a link to one."""
        ...

    def make_directory(self, directory: Path) -> None:
        """Make it and its parents; there may be one already."""
        ...

    def create(self, path: Path) -> Writer:
        """A new file; raises FileExistsError rather than write over one."""
        ...

    def open(self, path: Path) -> Reader:
        """Open for reading; raises UserError for a link or anything else that is not a file."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Move in one step: at any time there is either the one or the other."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Return when the names in `directory` are on the disk."""
        ...

    def delete(self, path: Path) -> None:
        """Remove a file, or a directory with all in it; links are removed, not followed."""
        ...

    def free_bytes(self, directory: Path) -> int:
        """What can still be written to `directory` (or, if there is none yet, to where it would be)."""
        ...


class LocalWriter:
    """See `Writer`."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    def write(self, data: memoryview | bytes) -> None:
        """See `Writer.write`."""
        rest = memoryview(data)
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """See `Writer.sync`."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """See `Writer.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> LocalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalReader:
    """See `Reader`."""

    def __init__(self, path: Path):
        try:
            # Without O_NONBLOCK a pipe of that name would be waited on for ever.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if path.is_symlink():
                raise UserError(f"{path} is a link, which no checkpoint holds; it is not followed") from error
            raise
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise UserError(f"{path} is not a file")
        self.size = status.st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See `Reader.read_into`."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def close(self) -> None:
        """See `Reader.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalStorage:
    """The local file system, or a shared one that is mounted."""

    def names(self, directory: Path) -> list[str]:
        """See `Storage.names`."""
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def is_directory(self, path: Path) -> bool:
        """See `Storage.is_directory`."""
        return path.is_dir() and not path.is_symlink()

    def make_directory(self, directory: Path) -> None:
        """See `Storage.make_directory`."""
        directory.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> Writer:
        """See `Storage.create`."""
        return LocalWriter(path)

    def open(self, path: Path) -> Reader:
        """See `Storage.open`."""
        return LocalReader(path)

    def rename(self, source: Path, target: Path) -> None:
        """See `Storage.rename`."""
        os.rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        """See `Storage.sync_directory`."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def delete(self, path: Path) -> None:
        """See `Storage.delete`."""
        if self.is_directory(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, directory: Path) -> int:
        """See `Storage.free_bytes`."""
        present = next(path for path in [directory, *directory.absolute().parents] if path.exists())
        return shutil.disk_usage(present).free


def spelled_bytes(size: int) -> str:
    """A size as people read it."""
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 else f"{size / 1024**2:.1f} MiB"
