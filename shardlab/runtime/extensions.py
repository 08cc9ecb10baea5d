"""DeepSpeed's compiled extensions: where they are kept, and how training does without the one that it would build.

DeepSpeed compiles when a rank first needs an extension: inside the collectives' time-out, with all others waiting;
and a build that is killed leaves a `lock` file on which every later start waits in silence
(https://github.com/pytorch/pytorch/issues/189245), which is why the doctor looks for those.

Nothing at the head imports torch or DeepSpeed.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

SHM_COMM = "deepspeed_shm_comm"  # built at every first CPU start of DeepSpeed, unless `without_shm_comm` is called


def extensions_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where extensions are built and loaded from: the user's TORCH_EXTENSIONS_DIR, or a directory of our own.

    Ours is keyed by all that a built library depends on: Python, torch, DeepSpeed, the installation and the CPU (a home
    directory may be shared by machines of several kinds).
    """
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    return cache_root(environment) / "extensions" / _key()


def zero_unavailable_reason() -> str | None:
    """Why DeepSpeed can't run here, in one line with what to do; None if it can. It only looks, and imports nothing."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: `pip install deepspeed`, or use shard.backend: fsdp, which needs none"
    return None


def without_shm_comm() -> None:
    """Tell DeepSpeed that this machine has no SHM_COMM, so that it neither builds nor loads it. Imports DeepSpeed.

    To be called before `deepspeed.init_distributed`. Only `inference_all_reduce` uses that extension, and training
    never calls it; without it that one falls back to the process group. So ZeRO's first start is a minute shorter, and
    needs no compiler, without which DeepSpeed 0.19 raises in `init_distributed`. The table is the one by which
    DeepSpeed itself leaves the extension out on systems other than Linux.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {**deepspeed.ops.__compatible_ops__, SHM_COMM: False}


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Where what belongs to this machine and user is kept: $SHARDLAB_CACHE, else ~/.cache/shardlab."""
    return Path(environment.get("SHARDLAB_CACHE") or Path.home() / ".cache" / "shardlab")


def _key() -> str:
    try:
        cpu = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    distinct = hashlib.sha256("\n".join((sys.prefix, platform.machine(), cpu)).encode()).hexdigest()[:10]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-torch{_version('torch')}-ds{_version('deepspeed')}-{distinct}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def is_open(file: Path) -> bool:
    """Whether a process of this machine has the file open. Processes of other users can't be seen into."""
    try:
        wanted = file.stat()
    except FileNotFoundError:
        return False
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = descriptor.stat()
        except OSError:
            continue  # gone meanwhile, or not ours to look at
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
