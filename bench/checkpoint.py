"""Saving and loading training state, beside DeepSpeed's and torch's own checkpoints and beside `dd`.

Two ranks hold the same state (masters and AdamW's moments, fp32, after one step); each contestant saves it in turn,
round after round, and `dd` with fsync writes as many bytes in the same round: what the disk takes at that moment. The
peers neither sync nor hash; their column "durable" adds an fsync of every file that they wrote, which ours has in it.
Loading starts with the files dropped from the page cache, and ours verifies every hash first.

An asynchronous save is measured by what it costs the training: the copy, and what the steps beside it take longer.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memory_by_backend import COMMON, RANKS, SIZES, tokens
from report import MiB, Report, Target, say

BACKENDS = {"fsdp": "DCP", "zero2": "DeepSpeed"}  # ours -> the peer whose state it is
SEQUENCE = 512
OF_THE_DISK, STALL = 0.8, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150m", help="model; tiny shows only that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--micro-batches", type=int, default=4, help=f"of {SEQUENCE} tokens, in a step of each rank")
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
            "stall ms": ".0f",
            "of a step": ".3f",
        },
        notes=["Save, durable: until all ranks are done. Stall: an asynchronous save's cost to the steps beside it."],
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
    saves: dict[str, list[float]] = {}
    for number in range(options.rounds):
        order: list[Contestant] = [ours, peer] if number % 2 == 0 else [peer, ours]
        for contestant in order:
            contestant.directory.mkdir(parents=True, exist_ok=True) if job.main else None
            seconds = job.timed(contestant.save)
            synced = job.timed(lambda one=contestant: job.sync(one.directory))
            saves.setdefault(f"{contestant.name} save", []).append(seconds)
            saves.setdefault(f"{contestant.name} durable", []).append(seconds + synced)
            written = sum(file.stat().st_size for file in contestant.directory.rglob("*") if file.is_file())
            saves.setdefault(f"{contestant.name} bytes", []).append(written)
            job.drop(contestant.directory)
            saves.setdefault(f"{contestant.name} load", []).append(job.timed(contestant.load))
            job.remove(contestant.directory)
        saves.setdefault("dd", []).append(job.timed(lambda: job.dd(int(saves[f"{ours.name} bytes"][-1]))))
    medians = {name: statistics.median(values) for name, values in saves.items()}
    stall, step = stalled(job, options.rounds)
    rows = [
        {
            "": contestant.name,
            "MiB": medians[f"{contestant.name} bytes"] / MiB,
            "save s": medians[f"{contestant.name} save"],
            "durable s": medians[f"{contestant.name} durable"],
            "of dd's rate": medians["dd"] / medians[f"{contestant.name} durable"],
            "load s": medians[f"{contestant.name} load"],
            "stall ms": stall * 1e3 if contestant is ours else None,
            "of a step": stall / step if contestant is ours else None,
        }
        for contestant in (ours, peer)
    ]
    rows.append({"": "dd with fsync", "MiB": medians[f"{ours.name} bytes"] / MiB, "save s": medians["dd"]})
    rows[-1] |= {"durable s": medians["dd"], "of dd's rate": 1.0}
    if job.main:
        (options.directory / "rows.json").write_text(json.dumps(rows))
    job.engine.close()


def stalled(job: "Job", rounds: int) -> tuple[float, float]:
    """(seconds that an asynchronous save costs the training, seconds of a step without one): medians."""
    from shardlab.checkpoint import AsyncSaver, Contents, Saver, join

    saver = AsyncSaver(Saver(job.directory / "async", join(job.engine.topology), keep=1))
    costs, plain = [], []
    for number in range(rounds + 1):
        alone = job.timed(job.step)
        contents = Contents(step=number, optimizer=job.engine.backend.optimizer_state())
        spent = job.timed(lambda: saver.save(contents, job.engine.backend.fragments))  # noqa: B023
        steps, done = 0, False
        while not done:
            spent += job.timed(job.step)
            steps += 1
            done = saver.poll() is not None
        if number > 0:  # the first makes the copy's memory
            costs.append(spent - steps * alone)
            plain.append(alone)
    saver.close()
    return statistics.median(costs), statistics.median(plain)


class Job:
    """A rank's engine, and what both contestants need."""

    def __init__(self, options: argparse.Namespace):
        from shardlab.model.build import build_model
        from shardlab.recipe import Recipe
        from shardlab.train.engine import Engine

        micro_batches = options.micro_batches
        recipe = Recipe.from_dict(
            {
                "model": {"config": str(options.directory / "config.json")},
                "data": {"sequence_length": SEQUENCE},
                "train": {"precision": "fp32", "global_batch_size": RANKS * micro_batches, "steps": 1000},
                "shard": {"backend": options.backend, "micro_batch": 1, "world_size": RANKS},
            }
        )
        self.directory: Path = options.directory
        self.engine = Engine.from_recipe(recipe)
        model, weights = build_model(recipe.model, vocabulary=1, eos_token_id=None, sequence_length=SEQUENCE, seed=0)
        self.engine.setup(model, weights, recipe.train.optimizer)
        self._micro_batches = micro_batches

    @property
    def main(self) -> bool:
        return self.engine.topology.is_main

    def step(self) -> None:
        """One step on random tokens."""
        import torch

        from shardlab.data import MicroBatch, Window

        rank, step = self.engine.topology.rank, self.engine.steps_done
        batches = []
        for number in range(self._micro_batches):
            row = tokens(step * self._micro_batches + number, rank, self.directory / "config.json", SEQUENCE)
            tensors = {
                "input_ids": row[:, :-1],
                "targets": row[:, 1:],
                "position_ids": torch.arange(SEQUENCE)[None],
            }
            batches.append(MicroBatch(tensors, rank * self._micro_batches + number))
        self.engine.run(Window(step, tuple(batches), RANKS * self._micro_batches * SEQUENCE))

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds until all ranks have done it."""
        import torch.distributed as dist

        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - started

    def sync(self, directory: Path) -> None:
        """Sync every file; of ours it finds nothing to do."""
        for file in _files(directory) if self.main else ():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def drop(self, directory: Path) -> None:
        """Take the files out of the page cache."""
        import torch.distributed as dist

        for file in _files(directory) if self.main else ():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        dist.barrier()

    def remove(self, directory: Path) -> None:
        """Make room."""
        import torch.distributed as dist

        dist.barrier()
        if self.main:
            shutil.rmtree(directory)
        dist.barrier()

    def dd(self, size: int) -> None:
        """Write as many bytes as a checkpoint has, by both ranks at once, and sync them."""
        file = self.directory / f"dd-{self.engine.topology.rank}"
        count = max(1, size // RANKS // MiB)
        command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={count}", "conv=fsync", "status=none"]
        subprocess.run(command, check=True)
        file.unlink()


def _files(directory: Path) -> Iterator[Path]:
    return (file for file in directory.rglob("*") if file.is_file())


class Ours:
    """Save and verified load of shardlab."""

    name = ""

    def __init__(self, job: Job):
        from shardlab.checkpoint import Saver, join

        self.name = f"shardlab {job.engine.plan.backend}"
        self.directory = job.directory / "ours"
        self._job = job
        self._ranks = join(job.engine.topology)
        self._saver = Saver(self.directory, self._ranks)

    def save(self) -> None:
        from shardlab.checkpoint import Contents

        backend = self._job.engine.backend
        self._saver.save(Contents(step=1, optimizer=backend.optimizer_state()), backend.fragments)

    def load(self) -> None:
        from shardlab.checkpoint import CheckpointReader, find_newest

        with CheckpointReader(find_newest(self.directory, self._ranks)) as reader:
            self._job.engine.backend.load(reader)


class DCP:
    """torch.distributed.checkpoint, as its users save a model and its optimizer."""

    name = "DCP (fsdp)"

    def __init__(self, job: Job):
        self.directory = job.directory / "dcp"
        self._job = job

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._job.engine.module, self._job.engine.backend.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=self.directory)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=self.directory)
        set_state_dict(
            self._job.engine.module,
            self._job.engine.backend.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DeepSpeed:
    """The engine's own checkpoint."""

    name = "DeepSpeed (zero2)"

    def __init__(self, job: Job):
        self.directory = job.directory / "deepspeed"
        self._engine: Any = job.engine.backend
        self._engine = self._engine._engine  # DeepSpeed's own

    def save(self) -> None:
        self._engine.save_checkpoint(str(self.directory), tag="one")

    def load(self) -> None:
        self._engine.load_checkpoint(str(self.directory), tag="one")


Peer = DCP | DeepSpeed
Contestant = Ours | DCP | DeepSpeed


if __name__ == "__main__":
    sys.exit(main())
