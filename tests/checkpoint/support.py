"""Fake ranks in threads, random training state, and the same state cut into random boxes."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardlab.checkpoint.ranks import Ranks
from shardlab.state.box import Box, whole
from shardlab.state.fragment import MASTER, Fragment

Result = TypeVar("Result")
State = Mapping[tuple[str, str], Tensor]

TIMEOUT_SECONDS = 240  # for the slowest disk: others write and sync a gigabyte meanwhile


class _Meeting:
    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_SECONDS)
        self.values: list[Any] = [None] * world_size


class ThreadRanks:
    """A rank that is a thread: values are put on a table between two barriers."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting):
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting

    def meet(self, what: str) -> None:
        self._meeting.barrier.wait()

    def gather(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def all(self, flag: bool) -> bool:
        return all(self.gather(flag))


def on_ranks(world_size: int, job: Callable[[Ranks], Result]) -> list[Result | Exception]:
    """`job` on each rank at once; what it returned or raised."""
    meeting = _Meeting(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(job, ThreadRanks(rank, world_size, meeting)) for rank in range(world_size)]
        results: list[Result | Exception] = []
        for future in futures:
            error = future.exception()
            assert error is None or isinstance(error, Exception)
            results.append(future.result() if error is None else error)
    return results


def succeed(results: list[Result | Exception]) -> list[Result]:
    """The results, none of which may be an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[return-value]


def cut(shape: tuple[int, ...], pieces: int, random_: random.Random) -> list[Box]:
    """About `pieces` boxes that make up a tensor, cut at random places along random dims."""
    start = whole(shape)
    boxes = [] if start is None else [start]
    for _ in range(pieces - 1):
        box = boxes.pop(random_.randrange(len(boxes))) if boxes else None
        if box is None:
            break
        dims = [dim for dim, length in enumerate(box.lengths) if length > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = random_.choice(dims)
        at = random_.randint(1, box.lengths[dim] - 1)
        head = list(box.lengths)
        head[dim] = at
        tail_offsets, tail = list(box.offsets), list(box.lengths)
        tail_offsets[dim] += at
        tail[dim] -= at
        boxes += [Box(box.offsets, tuple(head)), Box(tuple(tail_offsets), tuple(tail))]
    return boxes


def fragments_of(state: State, boxes: Mapping[tuple[str, str], list[Box]]) -> Iterator[Fragment]:
    """Views of `state`, cut into `boxes`."""
    for (name, kind), tensor in state.items():
        for box in boxes[name, kind]:
            yield Fragment(name, kind, tuple(tensor.shape), box, tensor[box.slices])


def whole_fragments(state: State) -> Callable[[], Iterator[Fragment]]:
    """A backend's `fragments` where one process holds all."""
    boxes = {key: [box] if (box := whole(tuple(tensor.shape))) else [] for key, tensor in state.items()}
    return lambda: fragments_of(state, boxes)


def small_state(step: int = 0) -> dict[tuple[str, str], Tensor]:
    """A few tensors whose values depend on `step`."""
    generator = torch.Generator().manual_seed(step)
    return {
        ("model.embed.weight", MASTER): torch.randn(40, 8, generator=generator),
        ("model.embed.weight", "exp_avg"): torch.randn(40, 8, generator=generator),
        ("model.norm.weight", MASTER): torch.randn(5, generator=generator).bfloat16(),
    }


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, NaNs included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = [value.clone(memory_format=torch.contiguous_format) for value in (left, right)]
    bits = [value.as_strided((value.numel(),), (1,)).view(torch.uint8) for value in bits]
    return torch.equal(*bits)
