"""What the ranks of `checkpoint.py` share: the job whose state is saved, and those who save and load it."""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_by_backend import RANKS, tokens
from report import MiB

SEQUENCE = 512


@dataclass(frozen=True)
class Took:
    """Seconds until all ranks were done, and the CPU seconds of all of them together."""

    seconds: float
    cpu: float


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

    def timed(self, action: Callable[[], object]) -> Took:
        """Do it on all ranks at once."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        action()
        spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        dist.barrier()
        seconds = time.perf_counter() - started
        dist.all_reduce(spent)
        return Took(seconds, float(spent[0]))

    def largest(self, seconds: float) -> float:
        """The value of the rank that has the largest."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value[0])

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
        backend: Any = job.engine.backend
        self._engine = backend._engine  # DeepSpeed's own

    def save(self) -> None:
        self._engine.save_checkpoint(str(self.directory), tag="one")

    def load(self) -> None:
        self._engine.load_checkpoint(str(self.directory), tag="one")


Peer = DCP | DeepSpeed
Contestant = Ours | DCP | DeepSpeed
