"""Saving and loading training state, beside DeepSpeed's and torch's own checkpoints and beside `dd`.

Two ranks hold the same state (masters and AdamW's moments, fp32, after one step); each contestant saves it in turn,
round after round, and `dd` with fsync writes as many bytes in the same round: what the disk takes at that moment. The
peers neither sync nor hash; their column "durable" adds an fsync of every file that they wrote, which ours has in it.
Loading starts with the files dropped from the page cache, and ours verifies every hash first.

The stall of an asynchronous save is the time that it holds the training: the slower rank's main thread in `save` (its
copy of the state, and the ranks' agreement) and in the `poll` after each step until the save is whole. Beside the steps
a thread writes, hashes and verifies: that is told in CPU seconds, which no other load on the machine changes.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpoint_job import DCP, SEQUENCE, Contestant, DeepSpeed, Job, Ours, Peer
from memory_by_backend import COMMON, RANKS, SIZES
from report import MiB, Report, Target, say

BACKENDS = {"fsdp": "DCP", "zero2": "DeepSpeed"}  # ours -> the peer whose state it is
OF_THE_DISK, STALL = 0.8, 0.05

Result = TypeVar("Result")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150m", help="model; tiny shows only that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant, and asynchronous saves")
    parser.add_argument("--micro-batches", type=int, default=1, help=f"of {SEQUENCE} tokens, in a step of each rank")
    parser.add_argument("--directory", type=Path, help="on the disk to measure [default: the temporary directory]")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--backend", help=argparse.SUPPRESS)  # a rank's own process
    options = parser.parse_args()
    if options.backend is not None:
        from shardlab.runtime.child import run_rank

        return run_rank(lambda: measure(options))
    compare(options).print(options.json)
    return 0


def compare(options: argparse.Namespace) -> Report:
    """Run both jobs, one after the other."""
    report = Report(
        f"Checkpoints: {options.size}, {RANKS} ranks, fp32 masters and two moments, median of {options.rounds} rounds",
        {
            "": "",
            "MiB": ".0f",
            "save s": ".2f",
            "durable s": ".2f",
            "of dd's rate": ".2f",
            "load s": ".2f",
            "load CPU s": ".2f",
            "stall ms": ".0f",
            "of a step": ".3f",
            "stall CPU ms": ".0f",
            "first ms": ".0f",
            "beside CPU s": ".2f",
        },
        notes=[
            "Save, durable, load: until all ranks are done; CPU: of all ranks together.",
            "Stall: what an asynchronous save holds the training for, and the CPU time in it; first: of the save that "
            "makes the copy's memory. Beside CPU: of a rank, in the thread that writes, hashes and verifies.",
        ],
    )
    for backend, peer in BACKENDS.items():
        say(f"{backend} beside {peer} ...")
        figures = run(backend, options)
        report.rows += figures
        ours, theirs = figures[0], figures[1]
        report.targets += [
            Target(f"{backend}: dd's time / ours", 1 / ours["of dd's rate"], 1 / OF_THE_DISK),
            Target(f"{backend}: save / {peer}'s, durable", ours["durable s"] / theirs["durable s"], 1.0),
            Target(f"{backend}: load / {peer}'s", ours["load s"] / theirs["load s"], 1.0),
            Target(f"{backend}: stall of an asynchronous save / a step", ours["of a step"], STALL),
        ]
    return report


def run(backend: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one job, as its first rank wrote them."""
    from shardlab.runtime.launch import launch

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        (Path(directory) / "config.json").write_text(json.dumps(COMMON | SIZES[options.size]))
        own = ["--backend", backend, "--directory", directory, "--rounds", str(options.rounds)]
        own += ["--size", options.size, "--micro-batches", str(options.micro_batches)]
        code = launch([sys.executable, __file__, *own], RANKS)
        if code:
            raise SystemExit(code)
        rows: list[dict[str, Any]] = json.loads((Path(directory) / "rows.json").read_text())
    return rows


def measure(options: argparse.Namespace) -> None:
    """One rank: train a step, then save and load in turns, then save beside steps."""
    job = Job(options)
    job.step()
    peer: Peer = DCP(job) if options.backend == "fsdp" else DeepSpeed(job)
    ours = Ours(job)
    found: dict[str, list[float]] = {}
    for number in range(options.rounds):
        order: list[Contestant] = [ours, peer] if number % 2 == 0 else [peer, ours]
        for contestant in order:
            for what, value in turn(job, contestant).items():
                found.setdefault(f"{contestant.name} {what}", []).append(value)
        size = int(found[f"{ours.name} bytes"][-1])
        found.setdefault("dd", []).append(job.timed(partial(job.dd, size)).seconds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [
        {
            "": contestant.name,
            "MiB": medians[f"{contestant.name} bytes"] / MiB,
            "save s": medians[f"{contestant.name} save"],
            "durable s": medians[f"{contestant.name} durable"],
            "of dd's rate": medians["dd"] / medians[f"{contestant.name} durable"],
            "load s": medians[f"{contestant.name} load"],
            "load CPU s": medians[f"{contestant.name} load CPU"],
        }
        for contestant in (ours, peer)
    ]
    rows[0] |= stalled(job, options.rounds)
    rows.append({"": "dd with fsync", "MiB": medians[f"{ours.name} bytes"] / MiB, "save s": medians["dd"]})
    rows[-1] |= {"durable s": medians["dd"], "of dd's rate": 1.0}
    if job.main:
        (options.directory / "rows.json").write_text(json.dumps(rows))
    job.engine.close()


def turn(job: Job, contestant: Contestant) -> dict[str, float]:
    """One save and one load, from the disk."""
    contestant.directory.mkdir(parents=True, exist_ok=True) if job.main else None
    saved = job.timed(contestant.save).seconds
    synced = job.timed(lambda: job.sync(contestant.directory)).seconds
    written = sum(file.stat().st_size for file in contestant.directory.rglob("*") if file.is_file())
    job.drop(contestant.directory)
    load = job.timed(contestant.load)
    job.remove(contestant.directory)
    return {
        "save": saved,
        "durable": saved + synced,
        "bytes": written,
        "load": load.seconds,
        "load CPU": load.cpu,
    }


def stalled(job: Job, rounds: int) -> dict[str, float]:
    """What asynchronous saves cost: medians over `rounds`, each of steps without a save and steps beside one."""
    from shardlab.checkpoint import AsyncSaver, Contents, Saver, join

    backend = job.engine.backend
    saver = AsyncSaver(Saver(job.directory / "async", join(job.engine.topology), keep=1))
    stalls, computed, steps, beside = [], [], [], []
    for number in range(rounds + 1):
        before = _thread_seconds()

        def save(number: int = number) -> Path | None:
            return saver.save(Contents(step=number, optimizer=backend.optimizer_state()), backend.fragments)

        held, cpu, path = _held(save)
        while path is None:
            job.step()
            more_held, more_cpu, path = _held(saver.poll)
            held, cpu = held + more_held, cpu + more_cpu
        stalls.append(job.largest(held))
        computed.append(job.largest(cpu))
        beside.append(job.largest(_thread_seconds() - before))
        steps.append(job.timed(job.step).seconds)
    saver.close()
    first, *others = stalls
    step = statistics.median(steps)
    return {
        "stall ms": statistics.median(others) * 1e3,
        "of a step": statistics.median(others) / step,
        "stall CPU ms": statistics.median(computed[1:]) * 1e3,
        "first ms": first * 1e3,
        "beside CPU s": statistics.median(beside),
    }


def _held(action: Callable[[], Result]) -> tuple[float, float, Result]:
    """Seconds that this rank is in `action`, its thread's CPU seconds in it, and what it returned.

    The ranks begin together, as after a step.
    """
    import torch.distributed as dist

    dist.barrier()
    started, cpu = time.perf_counter(), time.thread_time()
    result = action()
    return time.perf_counter() - started, time.thread_time() - cpu, result


def _thread_seconds() -> float:
    """CPU seconds so far of the thread that saves; 0 before there is one."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads if ident is not None)


if __name__ == "__main__":
    sys.exit(main())
