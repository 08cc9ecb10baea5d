"""Measured memory, against allocations of known size."""

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from shardlab.train.meter import MemoryMeter
from tests.train.support import one_rank

MiB = 1024**2
SIZE = 100 * MiB
SLACK = 8 * MiB  # the interpreter's own comings and goings, and the kernel's counters, which are kept per core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own figures, in /proc")


def fresh_pages(size: int = SIZE) -> mmap.mmap:
    """Of no allocator, which might give what it has kept of earlier tests'."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, size, mmap.PAGESIZE):
        pages[page] = 1
    return pages


@pytest.fixture
def meter() -> MemoryMeter:
    gc.collect()  # what earlier tests left would be freed at any moment
    meter = MemoryMeter(one_rank())
    meter.reset()
    return meter


def test_an_allocation_shows_in_the_peak_until_the_next_reset(meter: MemoryMeter) -> None:
    before = meter.current_bytes()
    assert meter.peak_bytes() >= before - SLACK
    block = fresh_pages()
    assert abs(meter.current_bytes() - before - SIZE) < SLACK
    block.close()
    assert abs(meter.current_bytes() - before) < SLACK
    assert abs(meter.peak_bytes() - before - SIZE) < SLACK
    meter.reset()
    assert abs(meter.peak_bytes() - before) < SLACK


def test_pages_of_a_mapped_file_do_not_count(meter: MemoryMeter) -> None:
    """The kernel can drop them: tokenised text of any size may be mapped."""
    library = max(Path(torch.__file__).with_name("lib").glob("*.so*"), key=lambda file: file.stat().st_size)
    assert library.stat().st_size > SIZE, "a file that is on a disk, whatever the temporary directory is on"
    before = meter.current_bytes()
    with library.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[page] for page in range(0, SIZE, mmap.PAGESIZE)) >= 0
        assert meter.current_bytes() - before < SLACK
        assert meter.peak_bytes() - before < SLACK


def test_a_stretch_can_be_left_out(meter: MemoryMeter) -> None:
    """What was the peak before it stays, and a new one shows after it."""
    before = meter.current_bytes()
    fresh_pages().close()
    with meter.left_out():
        fresh_pages(2 * SIZE).close()
    assert abs(meter.peak_bytes() - before - SIZE) < SLACK
    fresh_pages(3 * SIZE).close()
    assert abs(meter.peak_bytes() - before - 3 * SIZE) < SLACK
    meter.reset()
    assert abs(meter.peak_bytes() - before) < SLACK
