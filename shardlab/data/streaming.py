"""Windows of text that is read, tokenised and packed as it is needed: nothing but a chunk of it is ever held.

A chunk is some millions of tokens. Its rows are those of a corpus of its own, in an order of its own; chunk follows
chunk, epoch after epoch, the files in another order each time. Every rank tokenises the whole stream and keeps its
share of each window's rows: that costs each of them the tokenizer's time, and in return a step's rows and their number
of targets are the same at every world size, without a word between the ranks. A resumed run reads up to where it was.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from shardlab.data.corpus import CheckedCorpus
from shardlab.data.document_rows import DocumentRows
from shardlab.data.encode import Encoded, make_encoder, masks
from shardlab.data.order import permutation
from shardlab.data.packing import PackedRows
from shardlab.data.tokens import TokenStream, token_type
from shardlab.data.window import MicroBatch, Window
from shardlab.data.windows import Rows, micro_batches_of
from shardlab.errors import UserError

CHUNK_TOKENS = 1 << 22
RowsOfStream = Callable[[TokenStream], PackedRows | DocumentRows]


class StreamedText:
    """A corpus as chunks of rows. The counts are of what was read in the first epoch up to now."""

    def __init__(
        self,
        corpus: CheckedCorpus,
        tokenizer: PreTrainedTokenizerFast,
        rows: RowsOfStream,
        *,
        keep: int | None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """`keep` is how much of a document is used, if not all of it, so that a long one is not held whole."""
        self._corpus = corpus
        self._form = corpus.corpus.reading.form
        self._encoder = make_encoder(self._form, tokenizer)
        self._rows = rows
        self._keep = keep
        self._chunk_tokens = chunk_tokens
        self._dtype = token_type(tokenizer)
        self.masked_documents = self.truncated_documents = self.truncated_tokens = 0

    def chunks(self, epoch: int, seed: int) -> Iterator[PackedRows | DocumentRows]:
        """The rows of each chunk of an epoch."""
        files = len(self._corpus.corpus.sources)
        order = permutation(np.arange(files), files, seed, epoch).tolist()
        for stream, dropped in self._streams(self._encoder(self._corpus.samples(order))):
            rows = self._rows(stream)
            if epoch == 0 and isinstance(rows, DocumentRows):
                self.masked_documents += rows.masked_documents
                self.truncated_documents += rows.truncated_documents
                self.truncated_tokens += rows.truncated_tokens + dropped
            if len(rows):
                yield rows

    def _streams(self, encoded: Iterator[Encoded]) -> Iterator[tuple[TokenStream, int]]:
        """Chunks as streams, and how many tokens beyond `keep` were dropped for each."""
        cut = self._keep is None and not masks(self._form)  # plain text may be cut anywhere
        chunk = _Chunk(self._dtype)
        within = 0  # the document
        for piece in encoded:
            ids = np.asarray(piece.ids, dtype=self._dtype)
            kept = ids if self._keep is None else ids[: max(self._keep - within, 0)]
            chunk.dropped += len(ids) - len(kept)
            within = 0 if piece.last else within + len(kept)
            while cut and chunk.length + len(kept) > self._chunk_tokens:
                taken = self._chunk_tokens - chunk.length
                chunk.add(kept[:taken], None, last=True)
                yield chunk.stream(), chunk.dropped
                kept, chunk = kept[taken:], _Chunk(self._dtype)
            chunk.add(kept, piece.learned, last=piece.last)
            if piece.last and chunk.length >= self._chunk_tokens:
                yield chunk.stream(), chunk.dropped
                chunk = _Chunk(self._dtype)
        if chunk.length:
            yield chunk.stream(), chunk.dropped


class _Chunk:
    """Documents collected into a stream."""

    def __init__(self, dtype: np.dtype) -> None:
        self._ids: list[NDArray[np.unsignedinteger]] = [np.empty(0, dtype=dtype)]
        self._learned: list[NDArray[np.bool_]] = []
        self._ends: list[int] = []
        self.length = 0
        self.dropped = 0

    def add(self, ids: NDArray[np.unsignedinteger], learned: NDArray[np.bool_] | None, *, last: bool) -> None:
        self._ids.append(ids)
        if learned is not None:
            self._learned.append(learned)
        self.length += len(ids)
        if last and self.length > (self._ends[-1] if self._ends else 0):
            self._ends.append(self.length)

    def stream(self) -> TokenStream:
        learned = np.packbits(np.concatenate(self._learned), bitorder="little") if self._learned else None
        return TokenStream(np.concatenate(self._ids), np.array(self._ends, dtype=np.int64), learned)


class StreamLoader:
    """This rank's windows of the steps `start_step .. steps-1`, as a `WindowLoader`'s."""

    def __init__(
        self,
        text: StreamedText,
        *,
        global_batch_size: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        steps: int,
        start_step: int = 0,
    ) -> None:
        self._text = text
        self._global_batch_size = global_batch_size
        self._micro_batch = micro_batch
        self._micro_batches = micro_batches_of(rank, world_size, global_batch_size, micro_batch)
        self._seed = seed
        self._steps = range(start_step, steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Window]:
        rows = islice(self._ordered(), self._steps.start * self._global_batch_size, None)
        for step in self._steps:
            yield self._window(step, list(islice(rows, self._global_batch_size)))

    def _ordered(self) -> Iterator[tuple[Rows, int]]:
        """Every row, as its chunk and its index there, without end."""
        for epoch in count():
            empty = True
            for number, rows in enumerate(self._text.chunks(epoch, self._seed)):
                empty = False
                order = permutation(np.arange(len(rows)), len(rows), self._seed, (epoch << 32) + number)
                yield from ((rows, index) for index in order.tolist())
            if empty:
                raise UserError("data.files: no document has a token to learn; raise data.sequence_length")

    def _window(self, step: int, rows: Sequence[tuple[Rows, int]]) -> Window:
        size = self._micro_batch
        micro_batches = tuple(
            MicroBatch(_batch(rows[index * size : (index + 1) * size]), index) for index in self._micro_batches
        )
        return Window(step, micro_batches, sum(chunk.valid_tokens(indices) for chunk, indices in _grouped(rows)))


def _grouped(rows: Sequence[tuple[Rows, int]]) -> Iterator[tuple[Rows, list[int]]]:
    """Runs of rows of one chunk."""
    for _, run in groupby(rows, key=lambda row: id(row[0])):
        members = list(run)
        yield members[0][0], [index for _, index in members]


def _batch(rows: Sequence[tuple[Rows, int]]) -> dict[str, Tensor]:
    parts = [chunk.batch(indices) for chunk, indices in _grouped(rows)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
