"""Files read and written past the page cache, through buffers that may be used again.

O_DIRECT keeps the kernel from holding a second copy of everything that passes, which counts in a memory limit. Where a
filesystem refuses it the files are read and written as usual, and their pages dropped after each sync.
"""

import errno
import mmap
import os
import tempfile
import uuid
from pathlib import Path

import torch
from torch import Tensor

from shardlab.errors import UserError

SECTOR = 4096  # offsets, lengths and addresses are multiples of it
_MAX = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call


def aligned(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty tensor (elements,) that begins at a page, in anonymous memory of its own."""
    size = max(SECTOR, -(-elements * dtype.itemsize // SECTOR) * SECTOR)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=elements)


class DirectFile:
    """A file of a fixed size. Offsets are in bytes, and multiples of a sector like the tensors' sizes."""

    def __init__(self, path: Path, size: int, *, create: bool):
        """Open `path`, or make it and take its space on the disk at once.

        Raises UserError where it is missing or of another size, where the disk is full, or where it can't be written.
        """
        self.path = path
        self.size = size
        self._descriptor, self.direct = _open(path, create=create)
        try:
            if create:
                _allocate(self._descriptor, path, size)
            found = os.fstat(self._descriptor).st_size
            if found != size:
                raise UserError(
                    f"{path} has {found} bytes and should have {size}: the state in {path.parent} is damaged; remove "
                    "that directory and go on from a checkpoint"
                )
        except BaseException:
            os.close(self._descriptor)
            raise

    def read(self, into: Tensor, offset: int) -> None:
        """Fill `into` (contiguous, on the CPU). Raises UserError where the file ends before."""
        view = _bytes(into)
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done : done + _MAX]], offset + done)
            if count == 0:
                raise UserError(f"{self.path} ends at byte {offset + done}: it was cut short while in use")
            done += count

    def write(self, data: Tensor, offset: int) -> None:
        """Write `data` (contiguous, on the CPU); it is on the disk after `sync`."""
        view = _bytes(data)
        done = 0
        while done < len(view):
            done += os.pwritev(self._descriptor, [view[done : done + _MAX]], offset + done)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self._descriptor)
        if not self.direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def mapped(self, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
        """`elements` of the file as a tensor whose pages are read when they are looked at."""
        memory = mmap.mmap(self._descriptor, elements * dtype.itemsize, mmap.MAP_SHARED, offset=offset)
        memory.madvise(mmap.MADV_SEQUENTIAL)
        return torch.frombuffer(memory, dtype=dtype, count=elements)

    def read_ahead(self, offset: int, length: int) -> None:
        """Ask the kernel to read a range into its cache, for `mapped`."""
        os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close it; its bytes stay."""
        os.close(self._descriptor)


class UnnamedFile(DirectFile):
    """A file that grows, and that no directory names: it goes with the process, however that ends."""

    def __init__(self, directory: Path):
        """Raises UserError where it can't be made."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory} can't be made: {error.strerror}") from error
        super().__init__(directory / f"activations-{uuid.uuid4().hex}", 0, create=True)
        self.path.unlink()

    def grow(self, size: int) -> None:
        """Take space for `size` bytes in all. Raises UserError where the disk is full."""
        if size > self.size:
            _allocate(self._descriptor, self.path, size, self.size)
            self.size = size


def unnamed(directory: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor (elements,) of zeros whose memory is a file in `directory` that goes with it: the kernel may write it
    out at any time, so it takes no memory that is short. Raises UserError where the disk is full.
    """
    size = max(1, elements * dtype.itemsize)
    descriptor, name = tempfile.mkstemp(dir=directory, prefix="tensor-")
    try:
        os.unlink(name)
        _allocate(descriptor, directory / "tensor", size)
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=dtype, count=elements) if elements else torch.empty(0, dtype=dtype)


def _open(path: Path, *, create: bool) -> tuple[int, bool]:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    direct = getattr(os, "O_DIRECT", 0)  # macOS has another way, and no such flag
    try:
        if direct:
            try:
                return os.open(path, flags | direct, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if create:
                    path.unlink(missing_ok=True)  # some kernels make the file before they refuse the flag
        return os.open(path, flags, 0o600), False
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing: the state in {path.parent} is damaged; remove that directory and go on from a "
            "checkpoint"
        ) from error
    except (PermissionError, NotADirectoryError) as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def _allocate(descriptor: int, path: Path, size: int, start: int = 0) -> None:
    """Space now, not in the middle of a step. It reads as zeros."""
    try:
        if size > start:
            os.posix_fallocate(descriptor, start, size - start)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"disk full: {path} needs {(size - start) / 2**30:.2f} GiB more on {path.parent}"
            ) from error
        raise


def _bytes(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    raw: memoryview = data.detach().view(-1).view(torch.uint8).numpy().data
    return raw
