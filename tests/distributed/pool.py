"""Persistent worker processes, one pool per world size, forked from one that has imported everything: that costs six
seconds, a job a fraction of one."""

import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "DS_ACCELERATOR": "cpu"}
TIMEOUT_SECONDS = 420  # a job that takes longer hangs
PEERS_SECONDS = 5  # how long the other ranks may still take once one has failed


def _work(rank: int, world: int, store: str, jobs: Any, results: Any) -> None:
    os.environ.update(ENVIRONMENT)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=360)
    )
    modules = 0
    while (job := jobs.get()) is not None:
        module, function, arguments = job
        try:
            results.put((rank, getattr(importlib.import_module(module), function)(**arguments), None))
        except BaseException:  # noqa: BLE001  (told to the parent, which raises it)
            results.put((rank, None, traceback.format_exc()))
        if len(sys.modules) > modules:
            # What imports leave behind is never garbage. Looking through it again took most of each job's time.
            modules = len(sys.modules)
            gc.collect()
            gc.freeze()
    dist.destroy_process_group()


def _ancestor() -> ForkServerContext:
    """Of all ranks. The first process that is asked for starts it, and torch reads the environment but once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.imports"])
    with mock.patch.dict(os.environ, ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


class Pool:
    """`world` ranks over gloo on this host, each of which runs the same job."""

    def __init__(self, world: int, directory: Path):
        context = _ancestor()
        self.world = world
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

    def run(self, module: str, function: str, **arguments: Any) -> list[Any]:
        """Results of all ranks, by rank.

        Raises RuntimeError with the first failed rank's traceback, or where ranks die or hang. The pool is of no use
        after that: its ranks may still wait for each other.
        """
        for jobs in self._jobs:
            jobs.put((module, function, arguments))
        results: dict[int, Any] = {}
        first_error: str | None = None
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(results) < self.world and time.monotonic() < deadline:
            try:
                rank, results_of_rank, error = self._results.get(timeout=1)
            except queue.Empty:
                self._check_alive(first_error)
                continue
            results[rank] = results_of_rank
            if error is not None and first_error is None:
                first_error = f"rank {rank}: {error}"
                deadline = time.monotonic() + PEERS_SECONDS
        if first_error is not None:
            raise RuntimeError(first_error)
        if len(results) < self.world:
            raise RuntimeError(f"{function} hangs: ranks {set(range(self.world)) - set(results)} are silent")
        return [results[rank] for rank in range(self.world)]

    def _check_alive(self, first_error: str | None) -> None:
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                raise RuntimeError(first_error or f"rank {rank} ended with exit code {process.exitcode}")

    def close(self) -> None:
        """End the workers."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        """End the workers at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()


class Pools:
    """Pools by world size, each started when it is first needed and again after a failure."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._pools: dict[int, Pool] = {}
        self._started = 0

    def run(self, world: int, module: str, function: str, **arguments: Any) -> list[Any]:
        """See `Pool.run`."""
        if world not in self._pools:
            self._started += 1
            directory = self._directory / str(self._started)
            directory.mkdir()
            self._pools[world] = Pool(world, directory)
        try:
            return self._pools[world].run(module, function, **arguments)
        except RuntimeError:
            self._pools.pop(world).kill()
            raise

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()
