"""Directories of derived files: built once per host, whole or not there, verified when read.

An entry is built in a temporary directory and renamed into place, with a manifest of its files' hashes. Ranks of one
host meet at a file lock: the first builds, the others wait and then read. The kernel frees the lock of a process that
dies, so that a killed builder never blocks its peers.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shardlab.errors import UserError

_MANIFEST = "manifest.json"
_READ_BYTES = 1 << 20
_USER_CAN_MEND = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOTDIR, errno.EEXIST}
)

logger = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")


class _Damaged(Exception):
    """An entry that is not what its builder wrote."""


def cache_root(cache_dir: str | None) -> Path:
    """The recipe's `data.cache_dir`, else $SHARDLAB_CACHE, else ~/.cache/shardlab."""
    return Path(cache_dir or os.environ.get("SHARDLAB_CACHE") or "~/.cache/shardlab").expanduser()


def cached(root: Path, key: str, build: Callable[[Path], None], load: Callable[[Path], Loaded]) -> Loaded:
    """`load(root/key)`, after `build(directory)` has filled it if it is absent or damaged.

    `build` writes plain files into the directory that it is given and runs in one process of the host at a time.
    Raises UserError if the cache cannot be written (full, read-only, without file locks).
    """
    entry = root / key
    try:
        if entry.is_dir():
            try:
                return _verified(entry, load)
            except _Damaged:
                pass  # looked at again under the lock: another rank may be mending it
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            if entry.is_dir():
                try:
                    return _verified(entry, load)
                except _Damaged as damage:
                    logger.warning("cache entry %s is damaged (%s); building it again", entry, damage)
            _build(entry, build)
        return _verified(entry, load)
    except OSError as error:
        if error.errno in _USER_CAN_MEND:
            raise UserError(
                f"cannot write the cache {root}: {error.strerror}; free space there or set data.cache_dir elsewhere"
            ) from error
        raise


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in bounded memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock. The file stays: removing it would let two processes lock two different files."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    """Fill a temporary directory and rename it to `entry`; the caller holds the lock."""
    temporary = entry.parent / f"{entry.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # of a builder that was killed
    temporary.mkdir()
    try:
        build(temporary)
        manifest = {path.name: file_digest(path) for path in sorted(temporary.iterdir())}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        if entry.is_dir():
            # Moved first: a peer that still maps the damaged files keeps them, and none sees a half-deleted entry.
            os.rename(entry, temporary / "damaged")
            shutil.rmtree(temporary / "damaged")
        os.rename(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _verified(entry: Path, load: Callable[[Path], Loaded]) -> Loaded:
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        for name, digest in manifest.items():
            if file_digest(entry / name) != digest:
                raise _Damaged(f"{name} has changed")
    except (FileNotFoundError, ValueError, AttributeError) as error:
        raise _Damaged(str(error)) from error
    return load(entry)
