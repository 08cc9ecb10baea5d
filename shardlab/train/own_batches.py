"""A user's own batches as the backends take them: windows to train on, micro-batches to evaluate on."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from shardlab.backends.base import all_reduce_sum
from shardlab.data import MicroBatch, Window, windows_from_batches
from shardlab.topology import Topology


def windows_of(
    loader: Iterable[Mapping[str, Tensor]], topology: Topology, *, accumulation: int, start_step: int = 0
) -> Iterator[Window]:
    """Windows of `accumulation` of this rank's batches each; how many there are, all ranks agree on."""

    def sum_integers(values: Tensor) -> None:
        values.copy_(all_reduce_sum(values.to(topology.device), topology))

    return windows_from_batches(
        loader,
        start_step=start_step,
        accumulation=accumulation,
        rank=topology.rank,
        world_size=topology.world_size,
        all_reduce=sum_integers if topology.world_size > 1 else None,
    )


def batches_of(
    batches: Iterable[MicroBatch] | Iterable[Mapping[str, Tensor]], topology: Topology
) -> Iterator[MicroBatch]:
    """Micro-batches, whichever of the two they are; a user's own are as many on each rank afterwards."""
    source: Iterator[Any] = iter(batches)
    first = next(source, None)
    source = chain([] if first is None else [first], source)
    if isinstance(first, MicroBatch):
        yield from source
        return
    for window in windows_of(source, topology, accumulation=1):
        yield from window.micro_batches
