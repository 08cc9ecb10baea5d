"""Measured peaks of memory.

On an accelerator: what its allocator handed out. On a CPU: anonymous and shared pages of the process, which is what
runs out; pages of mapped files (libraries, tokenised text) can be dropped by the kernel and do not count.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from shardlab.topology import Topology


class MemoryMeter:
    """Peak bytes of this rank since `reset`."""

    def __init__(self, topology: Topology):
        self._device = torch.device(topology.device)
        self._earlier = 0  # the peak before a stretch that was left out

    def reset(self) -> None:
        """Start a new peak. Where the kernel does not allow it, the peak goes on from the process's start."""
        self._earlier = 0
        self._start_anew()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is mapped inside are files, whose pages the kernel counts as the process's: they are not in the peak."""
        self._earlier = self.peak_bytes()
        try:
            yield
        finally:
            self._start_anew()

    def _start_anew(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.memory.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        except OSError:
            return

    def current_bytes(self) -> int:
        """Memory in use now."""
        if self._device.type != "cpu":
            return int(torch.accelerator.memory.memory_allocated(self._device))
        status = _status()
        if status is None:
            return int(psutil.Process().memory_info().rss)
        return status["RssAnon"] + status["RssShmem"]

    def peak_bytes(self) -> int:
        """The largest use since `reset`."""
        return max(self._earlier, self._peak_bytes())

    def _peak_bytes(self) -> int:
        if self._device.type != "cpu":
            return int(torch.accelerator.memory.max_memory_allocated(self._device))
        status = _status()
        if status is None:
            return int(psutil.Process().memory_info().rss)
        # The kernel keeps one high-water mark for all resident pages; file pages hardly move during a run.
        return status["VmHWM"] - status["RssFile"]


def _status() -> dict[str, int] | None:
    """The memory lines of /proc/self/status in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
