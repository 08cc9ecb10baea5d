"""What a rank's process needs in its environment, whoever started it.

Each value was measured on small CPU machines: one OpenMP thread too many stalls every barrier, and glibc's defaults
hold up to 1 GiB per rank that no tensor uses any more.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

from shardlab.runtime.extensions import extensions_dir
from shardlab.runtime.processes import path_with_tools
from shardlab.topology import announced_rank, core_count

# Larger blocks are mapped, and so returned to the system when freed. Each page of them then faults anew when the next
# block is mapped: a fifth to a third of a step's CPU time on models of 6M to 34M. Several ranks on a host pay that, for
# memory is why they shard (4 MiB would cost each 8 to 29% more of it); a process alone keeps the blocks of activations.
_MMAP_THRESHOLD_BYTES = 256 * 1024
_MMAP_THRESHOLD_ALONE_BYTES = 4 * 1024**2
_MMAP_THRESHOLD_KEPT_BYTES = 32 * 1024**2  # the largest that glibc takes
_TRIM_THRESHOLD_KEPT_BYTES = 256 * 1024**2
_ARENA_MAX = 2  # arenas are not returned; glibc makes up to 8 per core
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def child_environment(nproc: int, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what `nproc` ranks on this host need; whatever `base` sets itself wins."""
    ours = {
        "OMP_NUM_THREADS": str(max(1, core_count() // nproc)),
        "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES if nproc > 1 else _MMAP_THRESHOLD_ALONE_BYTES),
        "MALLOC_ARENA_MAX": str(_ARENA_MAX),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(extensions_dir(base)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",  # progress lines reach a pipe or a log when they are written
    }
    environment = {**ours, **base}
    threads = environment["OMP_NUM_THREADS"]
    if nproc > 1 or (threads.isdigit() and int(threads) * nproc > core_count()):
        # A spinning thread that waits takes the core from the one it waits for.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    if not has_accelerator():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    environment["PATH"] = path_with_tools(environment.get("PATH", os.defpath))
    return environment


def apply_in_process() -> None:
    """The same for a process that we did not start: one without a launcher, or a rank of a foreign launcher.

    To be called before torch has allocated much and before DeepSpeed is imported. OpenMP's threads are left as they
    are: one process has all cores, and a launcher has set its own.
    """
    if sys.platform == "linux":
        alone = announced_rank()[1] == 1
        _set_malloc(_MMAP_THRESHOLD_ALONE_BYTES if alone else _MMAP_THRESHOLD_BYTES)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir()))
    os.environ["PATH"] = path_with_tools(os.environ.get("PATH", os.defpath))
    if not has_accelerator():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def keep_freed() -> None:
    """From here on malloc keeps what is freed, up to a limit, instead of returning it. glibc only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_KEPT_BYTES)


def has_accelerator() -> bool:
    """Whether torch can use an accelerator here. Imports torch."""
    import torch

    return torch.accelerator.is_available()


def _set_malloc(mmap_threshold_bytes: int) -> None:
    """What the MALLOC_ variables do, for a process that already runs. glibc only; elsewhere nothing."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    for variable, parameter, value in (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, mmap_threshold_bytes),
        ("MALLOC_ARENA_MAX", _M_ARENA_MAX, _ARENA_MAX),
    ):
        if variable not in os.environ:
            libc.mallopt(parameter, value)
