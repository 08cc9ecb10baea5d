"""What the pool's workers run for tests/distributed/test_shared_memory.py."""

import gc
import os
import random
import socket
import time
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardlab.backends.shared_memory import SharedMemory, _Gather, _Reduce
from shardlab.runtime.failure import classify

CPU = torch.device("cpu")


def join(gathered: int, reduced: int, seconds: float = 60.0) -> SharedMemory:
    group = dist.group.WORLD
    assert group is not None
    found = SharedMemory.join(group, gathered=gathered, reduced=reduced, timeout_seconds=seconds)
    assert found is not None
    return found


def collectives(sizes: list[int], largest: int) -> list[bool]:
    """Gathers and reductions of parts of `sizes` elements, with ranks out of step; whether each is as gloo's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, out_of_step = dist.group.WORLD, random.Random(rank)
    assert group is not None
    shared = join(largest * world * 4, largest * world * 4)
    gather, reduce = _Gather(shared), _Reduce(shared)
    same = []
    for number, size in enumerate(sizes):
        torch.manual_seed(100 * number + rank)
        dtype = torch.bfloat16 if number % 3 == 0 else torch.float32
        mine = torch.randn(size).to(dtype)
        output = gather.allocate((size * world,), dtype=dtype, device=CPU)
        part = output[rank * size : (rank + 1) * size].copy_(mine)
        gather(output, part, group)
        time.sleep(out_of_step.uniform(0, 0.003))
        copied, expected = output.clone(), torch.empty(size * world, dtype=dtype)
        dist.all_gather_single(expected, mine)
        same.append(torch.equal(copied, expected))
        gradient = torch.randn(size * world)
        buffer = reduce.allocate((size * world,), dtype=torch.float32, device=CPU)
        result = reduce.allocate((size,), dtype=torch.float32, device=CPU)
        buffer.copy_(gradient)
        time.sleep(out_of_step.uniform(0, 0.003))
        reduce(result, buffer, group, dist.ReduceOp.SUM)
        everybody = [torch.empty(size * world) for _ in range(world)]
        dist.all_gather(everybody, gradient)
        total = sum(one[rank * size : (rank + 1) * size] for one in everybody)
        same.append(torch.equal(result, total))  # added up in the order of the ranks
    shared.close()
    return same


def without_memory(refused_on: int) -> bool:
    """Whether this rank gets none, where rank `refused_on` can't make a socket."""
    group = dist.group.WORLD
    assert group is not None
    refuse: Any = mock.patch.object(socket.socket, "bind", side_effect=PermissionError("no"))
    if dist.get_rank() == refused_on:
        with refuse:
            return SharedMemory.join(group, gathered=64, reduced=64, timeout_seconds=5) is None
    return SharedMemory.join(group, gathered=64, reduced=64, timeout_seconds=5) is None


def failure_when_a_peer(does: str) -> tuple[str, str, float]:
    """(kind, message, seconds) of the error that rank 0 gets where rank 1 hangs up or stays away."""
    shared = join(64, 64, seconds=0.5)
    shared.wait()
    dist.barrier()
    kind, message, started = "", "", time.monotonic()
    if dist.get_rank() == 0:
        try:
            shared.wait()
        except RuntimeError as error:
            kind, message = classify(error), str(error)
    elif does == "hangs up":
        shared.close()
    dist.barrier()
    shared.close()
    return kind, message, time.monotonic() - started


def left_over() -> tuple[list[str], int, int]:
    """Named files in memory while this rank shares some, and its open files in memory then and after it has closed."""
    shared = join(4096, 4096)
    named = [name for name in os.listdir("/dev/shm") if "shardlab" in name]
    during = _open_files()
    shared.close()
    del shared
    gc.collect()
    return named, during, _open_files()


def _open_files() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:shardlab" in link for link in links)
