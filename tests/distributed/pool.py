"""Persistent worker processes, one pool per world size: importing torch costs seconds, a training job here a fraction of one."""

import importlib
import multiprocessing
import os
import queue
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 180  # a job that takes longer hangs; DeepSpeed's first engine compiles an extension before that


def _work(rank: int, world: int, store: str, jobs: Any, results: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", DS_ACCELERATOR="cpu")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while (job := jobs.get()) is not None:
        module, function, arguments = job
        try:
            results.put((rank, getattr(importlib.import_module(module), function)(**arguments), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """`world` ranks over gloo on this host, each of which runs the same job."""

    def __init__(self, world: int, directory: Path):
        context = multiprocessing.get_context("spawn")
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(world)]
        self._processes = [
            context.Process(
                target=_work, args=(rank, world, str(directory / "store"), self._jobs[rank], self._results), daemon=True
            )
            for rank in range(world)
        ]
        for process in self._processes:
            process.start()
        self.world = world

    def run(self, module: str, function: str, **arguments: Any) -> list[Any]:
        """Results of all ranks, by rank. Raises RuntimeError with the first rank's traceback."""
        for jobs in self._jobs:
            jobs.put((module, function, arguments))
        results: dict[int, Any] = {}
        errors: list[str] = []
        for _ in self._jobs:
            try:
                rank, value, error = self._results.get(timeout=TIMEOUT_SECONDS)
            except queue.Empty:
                raise RuntimeError(f"{function} hangs: ranks {set(range(self.world)) - set(results)} are silent") from None
            results[rank] = value
            if error is not None:
                errors.append(f"rank {rank}: {error}")
        if errors:
            raise RuntimeError(errors[0])
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the workers."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
