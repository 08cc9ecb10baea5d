"""Locks that killed builds of extensions have left, on which every later start waits in silence.

https://github.com/pytorch/pytorch/issues/189245
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardlab.doctor.check import Check
from shardlab.runtime.extensions import extensions_dir, is_open

_DEPTH = 3  # cache / version / extension / lock


def check_locks(environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """One check per lock, or one that says there is none."""
    roots = list(dict.fromkeys(lock_roots(environment)))
    locks = [lock for root in roots for lock in find_locks(root)]
    if not locks:
        yield Check("extension locks", "ok", f"none in {' and '.join(str(root) for root in roots)}")
    for lock in dict.fromkeys(locks):
        yield _judge(lock)


def lock_roots(environment: Mapping[str, str]) -> Iterator[Path]:
    """Where extensions are built: the user's TORCH_EXTENSIONS_DIR, ours (of all versions), and torch's default."""
    if environment.get("TORCH_EXTENSIONS_DIR"):
        yield Path(environment["TORCH_EXTENSIONS_DIR"])
    yield extensions_dir({**environment, "TORCH_EXTENSIONS_DIR": ""}).parent
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(cache) / "torch_extensions"


def find_locks(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Files named `lock`, where torch puts them: in an extension's directory."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return  # not there, or not ours to look into
    for entry in entries:
        if entry.name == "lock" and entry.is_file():
            yield entry
        elif depth and entry.is_dir() and not entry.is_symlink():
            yield from find_locks(entry, depth - 1)


def _judge(lock: Path) -> Check:
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return Check("extension locks", "ok", f"{lock} has just gone: a build ended")
    if is_open(lock):
        return Check("extension locks", "ok", f"{lock}: a process is building there, for {age:.0f} s")
    return Check(
        "extension locks",
        "failed",
        f"{lock} is {age:.0f} s old and no process here holds it: a killed build left it, and DeepSpeed waits for it "
        "for ever",
        f"if no other machine builds there: rm '{lock}'",
    )
