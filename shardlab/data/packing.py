"""Plain text packed into rows of one length: no padding, and nothing of one document reaches the next.

Row i reads tokens `i*T .. i*T+T-1` and predicts the token after each, so that neighbouring rows share one token. Where
a document ends in a row, `position_ids` start again at 0, which is what `transformers` makes a block-diagonal mask
from (with `use_cache=False`), and the first token of the next document is not a target.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.data.tokens import TokenStream
from shardlab.data.window import IGNORED

FILLER = -1  # the index of a row without a single target


class PackedRows:
    """Rows of `sequence_length` (T) tokens of one stream.

    The last row is filled up with eos inputs that form a document of their own and have no target. A document that
    goes on from the row before starts at position 0 again: it cannot see that row.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, eos: int) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
        if not len(stream.ends) or stream.ends[-1] != len(stream.tokens):
            raise ValueError("the stream's last document must end where its tokens do")
        if stream.learned is not None:
            raise ValueError("cutting anywhere parts an answer from its prompt: such documents go into DocumentRows")
        self.stream = stream
        self._tokens = stream.tokens
        self._ends = stream.ends
        self._length = len(stream.tokens)
        self.sequence_length = sequence_length
        self._eos = eos

    def __len__(self) -> int:
        # The last token has no successor to predict: it opens no row.
        return max(1, -(-(self._length - 1) // self.sequence_length))

    @property
    def used_positions(self) -> int:
        """Positions of all rows that hold text."""
        return min(self._length, len(self) * self.sequence_length)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """`input_ids`, `targets` and `position_ids` of these rows, each int64 `(len(indices), T)`.

        Index -1 stands for a filler row, without a target. Raises IndexError for a row that does not exist.
        """
        starts = self._starts(indices)[:, None]  # (n, 1)
        positions = starts + np.arange(self.sequence_length)  # (n, T), in the stream
        last = self._length - 1
        inputs = self._tokens[np.minimum(positions, last)].astype(np.int64)
        targets = self._tokens[np.minimum(positions + 1, last)].astype(np.int64)
        # Filler positions come after the last end: they count as a document that starts there.
        documents = np.searchsorted(self._ends, positions, side="right")
        bounds = np.append(self._ends, np.iinfo(np.int64).max)
        document_starts = np.where(documents > 0, self._ends[documents - 1], 0)
        inputs[positions > last] = self._eos
        targets[(positions + 1 == bounds[documents]) | (positions >= last)] = IGNORED
        return {
            "input_ids": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "position_ids": torch.from_numpy(positions - np.maximum(document_starts, starts)),
        }

    def valid_tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        """Number of targets that count in these rows, from the documents' ends alone: no token is read."""
        starts = self._starts(indices)
        stops = np.minimum(starts + self.sequence_length, self._length - 1)  # no target after the last token
        # A position has no target if a document ends right after it: ends in (start, stop].
        ends = np.searchsorted(self._ends, stops, side="right") - np.searchsorted(self._ends, starts, side="right")
        return int(np.maximum(stops - starts - ends, 0).sum())

    def _starts(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Stream position of each row's first token `(n,)`; a filler row begins where the stream has ended."""
        rows = np.asarray(indices, dtype=np.int64)
        if rows.size and (rows.min() < FILLER or rows.max() >= len(self)):
            raise IndexError(f"row indices must lie in [-1, {len(self)})")
        return np.where(rows == FILLER, self._length, rows * self.sequence_length)


def pack(documents: Sequence[Sequence[int]], sequence_length: int, eos: int) -> dict[str, Tensor]:
    """All rows of documents held in memory, as `PackedRows.batch` gives them. The documents bring their own eos."""
    kept = [document for document in documents if len(document)]
    ends = np.cumsum([len(document) for document in kept], dtype=np.int64)
    tokens = np.array([token for document in kept for token in document], dtype=np.uint32)
    rows = PackedRows(TokenStream(tokens, ends), sequence_length=sequence_length, eos=eos)
    return rows.batch(range(len(rows)))
