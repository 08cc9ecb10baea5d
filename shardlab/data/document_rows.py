"""Rows of whole documents: one in each, padded, or several where they fit.

A document longer than a row is cut to it. That is how answers keep their prompts, where `PackedRows` would cut
anywhere. What counts is decided by position, never by token id: padding may be the eos token, which is learned where it
ends a document. Documents of which nothing can be learned (the answer lies beyond the cut) are left out and counted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.data.packing import FILLER
from shardlab.data.tokens import TokenStream
from shardlab.data.window import IGNORED

_COUNTED_TOKENS = 1 << 22  # looked at together


class DocumentRows:
    """Rows of `sequence_length` (T) tokens; with `packed` several documents in a row, fewest rows by best fit.

    What is behind the documents is filled with `padding`, a document of its own without targets.
    `masked_documents` have no target in their first T tokens and are in no row; `truncated_documents` are cut, by
    `truncated_tokens` in all.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, padding: int, packed: bool) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
        whole = stream.lengths
        self.stream = stream
        self._padding = padding
        self.sequence_length = sequence_length
        self._starts = stream.ends - whole
        self._lengths = np.minimum(whole, sequence_length)
        targets = _count_targets(stream, self._starts, self._starts + self._lengths)
        kept = np.flatnonzero(targets)
        self.masked_documents = len(whole) - len(kept)
        self.truncated_documents = int((whole > sequence_length).sum())
        self.truncated_tokens = int((whole - self._lengths).sum())
        if packed:
            order, self._row_ends = best_fit(self._lengths[kept], sequence_length)
            self._documents = kept[order]
        else:
            self._documents, self._row_ends = kept, np.arange(1, len(kept) + 1)
        totals = np.concatenate(([0], np.cumsum(targets[self._documents])))[np.append(0, self._row_ends)]
        self._row_targets = np.append(np.diff(totals), 0)  # the last is the filler's, index -1

    def __len__(self) -> int:
        return len(self._row_ends)

    @property
    def used_positions(self) -> int:
        """Positions of all rows that hold text."""
        return int(self._lengths[self._documents].sum())

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """`input_ids`, `targets` and `position_ids` of these rows, each int64 `(len(indices), T)`.

        Index -1 stands for a filler row, without a target. Raises IndexError for a row that does not exist.
        """
        rows = self._checked(indices)
        shape = (len(rows), self.sequence_length)
        inputs = np.full(shape, self._padding, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            used = 0
            for document in self._in_row(row):
                start, length = int(self._starts[document]), int(self._lengths[document])
                ids = self.stream.tokens[start : start + length].astype(np.int64)
                learned = self.stream.learned_between(start + 1, start + length)
                here = slice(used, used + length)
                inputs[at, here] = ids
                targets[at, used : used + length - 1] = np.where(learned, ids[1:], IGNORED)
                positions[at, here] = np.arange(length)
                used += length
            positions[at, used:] = np.arange(self.sequence_length - used)
        return {
            "input_ids": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "position_ids": torch.from_numpy(positions),
        }

    def valid_tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        """Number of targets that count in these rows: counted once, when the rows were made."""
        return int(self._row_targets[self._checked(indices)].sum())

    def _checked(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        rows = np.asarray(indices, dtype=np.int64)
        if rows.size and (rows.min() < FILLER or rows.max() >= len(self)):
            raise IndexError(f"row indices must lie in [-1, {len(self)})")
        return rows

    def _in_row(self, row: int) -> list[int]:
        if row == FILLER:
            return []
        first = int(self._row_ends[row - 1]) if row else 0
        return list(self._documents[first : int(self._row_ends[row])])


def best_fit(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items of these lengths in rows that hold `capacity`: the items' order, and where in it each row ends.

    Best-fit decreasing: the longest first, each into the fullest row that it fits; at most 11/9 of the fewest rows
    possible, and four more (Johnson, "Near-optimal bin packing algorithms", 1973).
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows with that much space left
    spaces = 0  # bit s is set where by_space[s] has a row
    sizes = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[item]
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
            rows[row].append(item)
        else:
            space, row = capacity, len(rows)
            rows.append([item])
        if space > size:
            by_space[space - size].append(row)
            spaces |= 1 << (space - size)
    order = np.array([item for row in rows for item in row], dtype=np.int64)
    return order, np.cumsum([len(row) for row in rows], dtype=np.int64)


def _count_targets(stream: TokenStream, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Learned tokens of each document between `starts` and `ends`, but for its first, which nothing predicts."""
    if stream.learned is None:
        return np.maximum(ends - starts - 1, 0)
    counts = np.zeros(len(starts), dtype=np.int64)
    first = 0
    while first < len(starts):
        base = int(starts[first])
        last = max(first + 1, int(np.searchsorted(stream.ends, base + _COUNTED_TOKENS, side="right")))
        before = np.concatenate(([0], np.cumsum(stream.learned_between(base, int(stream.ends[last - 1])))))
        group = slice(first, last)
        after_first = np.minimum(starts[group] + 1, ends[group])
        counts[group] = before[ends[group] - base] - before[after_first - base]
        first = last
    return counts
