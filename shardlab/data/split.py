"""Which tokens are held out for evaluation: a function of the corpus alone, never of a seed.

So the evaluation figures of all runs on a corpus are over the same text.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlab.data.order import mix
from shardlab.errors import UserError

SPLIT_RULE = "whole documents by hashed index from 20 documents on, else the last tokens"  # part of the cache's key
_ENOUGH_DOCUMENTS = 20
_SHORTEST_STREAM = 2  # tokens: one input and its target


@dataclass(frozen=True)
class Part:
    """A token stream cut out of another: the ranges of tokens it takes, `(ranges, 2)`, and its documents' lengths."""

    spans: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def split(lengths: NDArray[np.int64], fraction: float, *, whole_documents: bool = False) -> tuple[Part, Part | None]:
    """Train and evaluation parts of a stream of documents of these `lengths` in tokens.

    About `fraction` of the tokens is held out: whole documents, chosen by a hash of their index, if there are at least
    20 or they are to stay whole (an answer needs its prompt); else the end of the stream, which may cut a document in
    two. A fraction of 0 holds nothing out.
    Raises UserError if the text is too short to leave something on both sides.
    """
    ends = np.cumsum(lengths)
    if fraction == 0:
        return Part(np.array([[0, ends[-1]]]), lengths), None
    if len(lengths) >= _ENOUGH_DOCUMENTS or whole_documents:
        if len(lengths) < 2:
            raise UserError(
                "data.evaluation_fraction: of a single document nothing can be held out; set it to 0 or give more"
            )
        held = _held_out_documents(lengths, fraction)
        return _documents(lengths, ends, ~held), _documents(lengths, ends, held)
    return _split_at(ends, _boundary(int(ends[-1]), fraction))


def _held_out_documents(lengths: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Walk the documents in hashed order and take each that still fits; the shortest one if none does."""
    held = np.zeros(len(lengths), dtype=bool)
    room = fraction * float(lengths.sum())
    shortest = int(lengths.min())
    for document in np.argsort(mix(np.arange(len(lengths), dtype=np.uint64)), kind="stable"):
        if lengths[document] <= room:
            held[document] = True
            room -= lengths[document]
        if room < shortest:
            break
    if not held.any():
        held[int(lengths.argmin())] = True
    return held


def _documents(lengths: NDArray[np.int64], ends: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Part:
    """The chosen documents; neighbours share a span."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)
    starts = np.concatenate(([0], ends))
    return Part(starts[edges], lengths[chosen])


def _boundary(tokens: int, fraction: float) -> int:
    if tokens < 2 * _SHORTEST_STREAM:
        raise UserError(
            f"data.evaluation_fraction: {tokens} tokens are too few to hold some out; set it to 0 or give more text"
        )
    held = min(max(round(tokens * fraction), _SHORTEST_STREAM), tokens - _SHORTEST_STREAM)
    return tokens - held


def _split_at(ends: NDArray[np.int64], boundary: int) -> tuple[Part, Part]:
    total = int(ends[-1])
    before = np.append(ends[ends < boundary], boundary)
    after = ends[ends > boundary] - boundary
    return (
        Part(np.array([[0, boundary]]), np.diff(before, prepend=0)),
        Part(np.array([[boundary, total]]), np.diff(after, prepend=0)),
    )
