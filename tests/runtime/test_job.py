"""A job of ranks in a process of its own ends with whoever asked for it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ASKING = """
import sys
from shardlab.runtime.job import RankJob
with RankJob("sleeper", [sys.argv[1]], nproc=1, timeout_seconds=300) as job:
    job.wait()
"""
SLEEPER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"


@pytest.mark.slow
def test_ranks_go_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    """Killed so that no handler of its own runs."""
    (tmp_path / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
    file = tmp_path / "pid"
    asking = subprocess.Popen([sys.executable, "-c", ASKING, str(file)], cwd=tmp_path)
    deadline = time.monotonic() + 240
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    rank = psutil.Process(int(file.read_text()))
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    deadline = time.monotonic() + 60
    while _runs(rank):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    """One that nobody has reaped yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
