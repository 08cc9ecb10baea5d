"""`shardlab doctor --calibrate`: how fast this machine is, measured once and kept for `shardlab plan`.

One rank alone, then two at once: what they share of memory bandwidth shows only so. The figures have the form of the
ones that the planner ships, so `--json` writes a new `shardlab/planner/calibration.json`.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shardlab.backends.stream.direct import DirectFile, aligned
from shardlab.doctor.ranks import RankJob
from shardlab.errors import UserError
from shardlab.planner import calibration
from shardlab.topology import core_count

SECONDS = 2.0  # of each trial
WIDTH = 512  # of the matrices and of the model
TIMEOUT_SECONDS = 600.0
_DISK_BYTES = 256 * 1024**2
_PIECE = 4 * 1024**2
_BUSY = 0.3  # of the cores


def calibrate(seconds: float = SECONDS, disk_bytes: int = _DISK_BYTES, width: int = WIDTH) -> dict[str, Any]:
    """Measure, keep, and return what was kept. Raises UserError where the ranks do not come to an end."""
    busy = _load()
    alone, pair = _measure(1, seconds, width), _measure(2, seconds, width)
    accelerator = alone.pop("accelerator")
    if pair.pop("accelerator") != accelerator:  # there is only one: two ranks ran on the CPU
        pair = {**alone, "hop": 0.0, "link": {}}
    path = calibration.file()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "accelerator": accelerator,
        "load": busy,
        "ranks": {"1": alone, "2": pair},
        "disk": disk_rates(path.parent, disk_bytes),
    }
    calibration.write(found)
    return {"identity": calibration.identity(), **found}


def _load() -> float:
    """Processes that wanted to run in the last minute, for each core."""
    return os.getloadavg()[0] / core_count()


def _measure(ranks: int, seconds: float, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardlab-") as directory:
        file = Path(directory) / "figures.json"
        arguments = [str(file), str(seconds), str(width)]
        with RankJob(
            "shardlab.doctor.calibrate_job", arguments, nproc=ranks, timeout_seconds=TIMEOUT_SECONDS
        ) as running:
            ended = running.wait()
        if not ended.done:
            raise UserError(f"calibrating with {ranks} rank(s) failed: {ended.cause}; see shardlab doctor")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def disk_rates(directory: Path, size: int) -> dict[str, float]:
    """Bytes per second of one file there: written and synced, then read, not from the page cache where Linux lets go.

    And `both`, as backend stream uses a disk: read and written at once.
    On a file system in memory they are memory's.
    """
    block = os.urandom(1024**2)  # what a file system would compress is no measure
    blocks = max(1, size // len(block))
    with tempfile.NamedTemporaryFile(dir=directory, prefix="disk-", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
        wrote = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(len(block)):
            pass
        read = time.perf_counter() - started
    return {
        "write": blocks * len(block) / wrote,
        "read": blocks * len(block) / read,
        "both": both_ways(directory, size),
    }


def both_ways(directory: Path, size: int) -> float:
    """Bytes per second of one file read and another written at once, by three threads each past the page cache."""
    size = max(1, size // _PIECE) * _PIECE
    with tempfile.TemporaryDirectory(dir=directory, prefix="disk-") as made, ThreadPoolExecutor(6) as pool:
        files = [DirectFile(Path(made) / name, size, create=True) for name in ("read", "written")]
        buffers = [aligned(_PIECE, torch.uint8).random_() for _ in range(6)]

        def move(number: int) -> None:
            which, part = divmod(number, 3)
            act = files[which].write if which else files[which].read
            for offset in range(part * _PIECE, size, 3 * _PIECE):
                act(buffers[number], offset)

        for offset in range(0, size, _PIECE):  # what was never written is read from nowhere
            files[0].write(buffers[0], offset)
        started = time.perf_counter()
        list(pool.map(move, range(6)))
        files[1].sync()
        took = time.perf_counter() - started
        for file in files:
            file.close()
    return 2 * size / took


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    said = []
    for ranks, figures in found["ranks"].items():
        rates = [
            f"{what} {precision} {rate / 1e9:,.0f}"
            for what, name in (("products", "products"), ("attention", "attention"))
            for precision, rate in figures[name].items()
        ]
        memory = f"memory {figures['memory'] / 1e9:.3g} GB/s, whole models {figures['stream'] / 1e9:.3g}"
        head = "1 rank alone" if ranks == "1" else "each of 2 ranks"
        said.append(f"{head}, threads {figures['threads']}: GFLOP/s: {', '.join(rates)}")
        said.append(f"  {memory}; {figures['operation'] * 1e6:.2g} us to start an operator")
        shares = [
            f"{share:.0%} in {precision} with {tokens} tokens"
            for precision, by_tokens in figures["reached"].items()
            for tokens, share in by_tokens.items()
        ]
        said.append(f"  of that a model reaches {', '.join(shares)}")
    pair = found["ranks"]["2"]
    links = ", ".join(f"{name} {rate / 1e9:.2g} GB/s" for name, rate in pair["link"].items())
    if links:
        said.append(f"between 2 ranks: {links}; {pair['hop'] * 1e6:.3g} us a hop")
    disk = found["disk"]
    rates = [
        f"{name} {disk[key] / 1e9:.2g}" for name, key in (("write", "write"), ("read", "read"), ("at once", "both"))
    ]
    said.append(f"disk of the cache directory, GB/s: {', '.join(rates)}")
    if found["load"] > _BUSY:
        said.append(f"the machine was busy (load {found['load']:.1f} a core): run this again when it is quiet")
    said.append(f"kept in {calibration.file()}; shardlab plan and train now predict time by it")
    return said
