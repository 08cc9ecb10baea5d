"""What the ranks find in their environment, and the same for a process that we did not start."""

import os
import subprocess
import sys

import pytest

from shardlab.runtime import environment
from shardlab.runtime.environment import child_environment


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "core_count", lambda: 4)
    monkeypatch.setattr(environment, "has_accelerator", lambda: False)


@pytest.mark.parametrize(("nproc", "threads"), [(1, "4"), (2, "2"), (4, "1"), (8, "1")])
def test_cores_are_shared_out(nproc: int, threads: str) -> None:
    assert child_environment(nproc, {})["OMP_NUM_THREADS"] == threads


def test_waiting_threads_do_not_spin_where_ranks_share_cores() -> None:
    assert "OMP_WAIT_POLICY" not in child_environment(1, {})
    assert child_environment(2, {})["OMP_WAIT_POLICY"] == "passive"
    assert child_environment(1, {"OMP_NUM_THREADS": "8"})["OMP_WAIT_POLICY"] == "passive"


def test_what_the_user_set_wins() -> None:
    users = {
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "active",
        "MALLOC_ARENA_MAX": "9",
        "DS_ACCELERATOR": "xpu",
        "TORCH_EXTENSIONS_DIR": "/somewhere",
        "HF_HUB_OFFLINE": "0",
    }
    assert users.items() <= child_environment(2, users).items()


def test_what_ranks_need_is_set() -> None:
    got = child_environment(2, {"PATH": "/bin"})
    assert got["MALLOC_MMAP_THRESHOLD_"] == "262144"
    assert got["MALLOC_ARENA_MAX"] == "2"
    assert got["TOKENIZERS_PARALLELISM"] == "false"
    assert got["DS_ACCELERATOR"] == "cpu"
    assert got["PYTHONFAULTHANDLER"] == "1"
    assert got["PATH"] == f"{os.path.dirname(sys.executable)}{os.pathsep}/bin"
    assert "HF_HUB_OFFLINE" not in got


def test_only_ranks_that_share_a_host_give_back_every_block_of_activations() -> None:
    assert child_environment(1, {})["MALLOC_MMAP_THRESHOLD_"] == str(4 * 1024**2)
    assert child_environment(2, {})["MALLOC_MMAP_THRESHOLD_"] == str(256 * 1024)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(("then", "mapped"), [("", 1), ("environment.keep_freed()", 0)])
def test_freed_blocks_go_back_to_the_system_unless_they_are_to_be_kept(then: str, mapped: int) -> None:
    """In a process that already runs: the second block of a size is mapped again, where glibc would keep the first."""
    code = f"""
import ctypes, os
from shardlab.runtime import environment
environment.apply_in_process()
{then}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
class Info(ctypes.Structure):  # malloc.h: mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]
libc.mallinfo2.restype = Info
libc.free(libc.malloc(20_000_000))
before = libc.mallinfo2().hblks
kept = libc.malloc(10_000_000)
print(libc.mallinfo2().hblks - before, os.environ["DS_ACCELERATOR"], "OMP_NUM_THREADS" in os.environ)
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "OMP_", "DS_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout == f"{mapped} cpu False\n"
