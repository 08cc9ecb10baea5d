"""Rows in an order, cut into windows: which rank runs which row at which step.

Everything follows from the global sample position: step s takes positions `s*G .. s*G+G-1`, and its micro-batches go to
the ranks in blocks. So the rows of a step depend neither on world size nor on micro-batch, a resume needs only the
step, and each rank knows the window's token count without asking its peers.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardlab.data.order import rows_at
from shardlab.data.packing import FILLER
from shardlab.data.window import MicroBatch, Window
from shardlab.errors import UserError


class Rows(Protocol):
    """A fixed set of rows that can be batched in any order; index -1 is a filler row, without targets."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]: ...

    def valid_tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> int: ...


@runtime_checkable
class AugmentedRows(Rows, Protocol):
    """Rows that change each time they are seen, by numbers that are the same in every run.

    `seeds` has one number for each index: a function of the run's seed and of the sample's position in the whole run,
    so it differs between samples, epochs and ranks, and depends on neither the world size nor a resume.
    """

    def batch_at(self, indices: NDArray[np.int64], seeds: NDArray[np.uint64]) -> dict[str, Tensor]: ...


def sample_seeds(seed: int, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 63-bit number for each global sample position (a splitmix64 step)."""
    run = np.full(positions.shape, seed, dtype=np.uint64)  # arrays wrap round in silence, scalars warn
    state = run * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64)
    state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) >> np.uint64(1)


class WindowLoader:
    """This rank's windows of the steps `start_step .. steps-1`. Can be iterated more than once, with the same result.

    `global_batch_size` and `micro_batch` count rows. Rows come shuffled, epoch after epoch, by `seed`. With
    `total_samples` the data ends there: the last window is filled up with rows without targets, so
    that every rank runs the same number of micro-batches.
    Raises UserError if the global batch is not a multiple of micro-batch times world size.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        global_batch_size: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        steps: int,
        start_step: int = 0,
        total_samples: int | None = None,
    ) -> None:
        self._rows = rows
        self._global_batch_size = global_batch_size
        self._micro_batch = micro_batch
        self._seed = seed
        self._start_step = start_step
        self._total_samples = total_samples
        self._micro_batches = micro_batches_of(rank, world_size, global_batch_size, micro_batch)
        self._end_step = steps
        if total_samples is not None:
            self._end_step = min(steps, -(-total_samples // global_batch_size))

    def __len__(self) -> int:
        return max(0, self._end_step - self._start_step)

    def __iter__(self) -> Iterator[Window]:
        for step in range(self._start_step, self._end_step):
            yield self._window(step)

    def _window(self, step: int) -> Window:
        first = step * self._global_batch_size
        positions = np.arange(first, first + self._global_batch_size, dtype=np.int64)
        rows = rows_at(positions, len(self._rows), self._seed)
        if self._total_samples is not None:
            rows[positions >= self._total_samples] = FILLER
        micro_batches = tuple(MicroBatch(self._batch(rows, positions, index), index) for index in self._micro_batches)
        return Window(step, micro_batches, self._rows.valid_tokens(rows))

    def _batch(self, rows: NDArray[np.int64], positions: NDArray[np.int64], index: int) -> dict[str, Tensor]:
        part = slice(index * self._micro_batch, (index + 1) * self._micro_batch)
        if isinstance(self._rows, AugmentedRows):
            return self._rows.batch_at(rows[part], sample_seeds(self._seed, positions[part]))
        return self._rows.batch(rows[part])


def micro_batches_of(rank: int, world_size: int, global_batch_size: int, micro_batch: int) -> range:
    """Which of a step's micro-batches a rank runs. Raises UserError if they don't come out even."""
    if min(global_batch_size, micro_batch) < 1 or global_batch_size % (micro_batch * world_size):
        raise UserError(
            f"train.global_batch_size {global_batch_size} is not a multiple of shard.micro_batch {micro_batch} x "
            f"{world_size} ranks = {micro_batch * world_size}"
        )
    accumulation = global_batch_size // (micro_batch * world_size)
    return range(rank * accumulation, (rank + 1) * accumulation)


def evaluation_batches(
    rows: Rows, *, micro_batch: int, rank: int, world_size: int, limit: int | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of the rows: over all ranks each row exactly once, on each rank the same number of batches.

    What is missing at the end is filled with rows without targets. `limit` counts rows over all ranks.
    """
    count = len(rows) if limit is None else min(limit, len(rows))
    rounds = -(-count // (micro_batch * world_size))
    for index in range(rank, rounds * world_size, world_size):  # dealt in turn, so that no rank gets all the filler
        indices = np.arange(index * micro_batch, (index + 1) * micro_batch, dtype=np.int64)
        yield MicroBatch(rows.batch(np.where(indices < count, indices, FILLER)), index)
