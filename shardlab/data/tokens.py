"""A corpus as token ids: encoded once, kept in an Arrow file, mapped into memory by whoever reads it.

Each stream is one Arrow IPC stream of one record batch, a row a document: `input_ids: large_list<uint16 or uint32>`,
and `learned: large_list<bool>` where prompts are not. `datasets.Dataset.from_file` reads it, and the columns' values
and offsets are, without a copy, all tokens in a row, a bit for each, and where each document ends.
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from shardlab.data.cache import cached
from shardlab.data.corpus import CheckedCorpus
from shardlab.data.encode import Encoded, make_encoder, masks, opening
from shardlab.data.split import SPLIT_RULE, Part, split
from shardlab.data.tokenizer import tokenizer_digest
from shardlab.errors import UserError

COLUMN = "input_ids"
LEARNED_COLUMN = "learned"
_FORMAT = 2  # raised when the files' content would come out differently
_COPY_TOKENS = 1 << 22  # a multiple of 8: whole bytes of bits


@dataclass(frozen=True)
class TokenStream:
    """Token ids of documents one after the other, memory-mapped.

    `tokens`: `(n,)` uint16 or uint32. `ends`: `(documents,)` int64, rising: the position after each document's last.
    `learned`: a bit per token, lowest first, `(n / 8,)` uint8: whether it is a target; None: all are.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]
    learned: NDArray[np.uint8] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def learned_between(self, start: int, end: int) -> NDArray[np.bool_]:
        """Which of the tokens `start .. end-1` are learned."""
        if self.learned is None:
            return np.ones(end - start, dtype=bool)
        bits = np.unpackbits(self.learned[start // 8 : -(-end // 8)], bitorder="little")
        return bits[start % 8 :][: end - start].astype(bool)


@dataclass(frozen=True)
class TokenizedCorpus:
    """The streams of a corpus. `fingerprint` identifies text, tokenizer and split: equal means the same tokens."""

    train: TokenStream
    evaluation: TokenStream | None
    fingerprint: str


def corpus_fingerprint(
    corpus: CheckedCorpus, tokenizer: PreTrainedTokenizerFast, evaluation_fraction: float = 0.0
) -> str:
    """What identifies a corpus's tokens."""
    parts = (_FORMAT, corpus.digest, tokenizer_digest(tokenizer), opening(tokenizer), evaluation_fraction, SPLIT_RULE)
    return hashlib.sha256(" ".join(map(repr, parts)).encode()).hexdigest()[:32]


def tokenize_corpus(
    corpus: CheckedCorpus, tokenizer: PreTrainedTokenizerFast, evaluation_fraction: float, cache: Path
) -> TokenizedCorpus:
    """Map the corpus's token streams, encoding it first if the cache hasn't got them.

    One process of a host encodes, the others wait. See `encode` for what a document's tokens are.
    Raises UserError if the text is too short to be split, or the cache cannot be written.
    """
    fingerprint = corpus_fingerprint(corpus, tokenizer, evaluation_fraction)

    def build(directory: Path) -> None:
        _write_streams(directory, corpus, tokenizer, evaluation_fraction)

    def load(directory: Path) -> TokenizedCorpus:
        evaluation = directory / "evaluation.arrow"
        return TokenizedCorpus(
            read_stream(directory / "train.arrow"),
            read_stream(evaluation) if evaluation.exists() else None,
            fingerprint,
        )

    return cached(cache / "tokens", fingerprint, build, load)


def read_stream(path: Path) -> TokenStream:
    """Map a stream's file: no byte of it is copied."""
    with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
        batch = reader.read_next_batch()
    documents = batch.column(COLUMN)
    learned = None
    if LEARNED_COLUMN in batch.schema.names:
        learned = np.frombuffer(batch.column(LEARNED_COLUMN).values.buffers()[1], dtype=np.uint8)
    return TokenStream(
        documents.values.to_numpy(zero_copy_only=True), documents.offsets.to_numpy(zero_copy_only=True)[1:], learned
    )


def token_type(tokenizer: PreTrainedTokenizerFast) -> np.dtype:
    """The smallest type that holds all of a tokenizer's ids."""
    return np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.uint32)


def _write_streams(directory: Path, corpus: CheckedCorpus, tokenizer: PreTrainedTokenizerFast, fraction: float) -> None:
    """Encode to raw files first: which documents are held out depends on all their lengths."""
    form = corpus.corpus.reading.form
    encoded = make_encoder(form, tokenizer)(corpus.samples())
    raw, raw_learned = directory / "tokens.raw", directory / "learned.raw"
    dtype = token_type(tokenizer)
    with raw.open("wb") as tokens_file, raw_learned.open("wb") as learned_file:
        lengths = _write_documents(tokens_file, learned_file, encoded, dtype)
    if not lengths.sum():
        raise UserError(f"{corpus.corpus.key}: the tokenizer makes no token of any of {len(lengths)} documents")
    tokens = np.memmap(raw, dtype=dtype, mode="r")
    learned = np.memmap(raw_learned, dtype=bool, mode="r") if masks(form) else None
    train, evaluation = split(lengths, fraction, whole_documents=masks(form))
    parts = {"train": train} if evaluation is None else {"train": train, "evaluation": evaluation}
    for name, part in parts.items():
        _write_part(directory, name, tokens, learned, part)
    raw.unlink()
    raw_learned.unlink()


def _write_documents(
    tokens_file: BinaryIO, learned_file: BinaryIO, encoded: Iterable[Encoded], dtype: np.dtype
) -> NDArray[np.int64]:
    """Write every document's ids, and a byte for each that says whether it is learned if some aren't; return the
    documents' lengths."""
    lengths = array("q")
    length = 0
    for piece in encoded:
        np.asarray(piece.ids, dtype=dtype).tofile(tokens_file)
        if piece.learned is not None:
            piece.learned.tofile(learned_file)
        length += len(piece.ids)
        if piece.last:
            lengths.append(length)
            length = 0
    return np.frombuffer(lengths, dtype=np.int64)


def _write_part(
    directory: Path,
    name: str,
    tokens: NDArray[np.unsignedinteger],
    learned: NDArray[np.bool_] | None,
    part: Part,
) -> None:
    """Copy the part's spans together, then write them: an Arrow record batch wants its values in one piece."""
    raw, bits = directory / f"{name}.raw", directory / f"{name}.bits"
    _copy_spans(raw, tokens, part)
    values = np.memmap(raw, dtype=tokens.dtype, mode="r")
    if learned is None:
        _write_arrow(directory / f"{name}.arrow", values, None, part.lengths)
    else:
        flags = directory / f"{name}.flags"
        _copy_spans(flags, learned, part)
        _pack_bits(bits, np.memmap(flags, dtype=bool, mode="r"))
        _write_arrow(directory / f"{name}.arrow", values, np.memmap(bits, dtype=np.uint8, mode="r"), part.lengths)
        flags.unlink()
        bits.unlink()
    raw.unlink()


def _copy_spans(path: Path, values: NDArray, part: Part) -> None:
    with path.open("wb") as file:
        for start, end in part.spans:
            for position in range(start, end, _COPY_TOKENS):
                values[position : min(position + _COPY_TOKENS, end)].tofile(file)


def _pack_bits(path: Path, flags: NDArray[np.bool_]) -> None:
    with path.open("wb") as file:
        for position in range(0, len(flags), _COPY_TOKENS):
            np.packbits(flags[position : position + _COPY_TOKENS], bitorder="little").tofile(file)


def _write_arrow(
    path: Path, tokens: NDArray[np.unsignedinteger], learned: NDArray[np.uint8] | None, lengths: NDArray[np.int64]
) -> None:
    """Write from the mappings: the kernel pages the tokens in and out, they are never all resident."""
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), type=pa.int64())
    columns = {
        COLUMN: pa.Array.from_buffers(pa.from_numpy_dtype(tokens.dtype), len(tokens), [None, pa.py_buffer(tokens)])
    }
    if learned is not None:
        columns[LEARNED_COLUMN] = pa.Array.from_buffers(pa.bool_(), len(tokens), [None, pa.py_buffer(learned)])
    batch = pa.record_batch(
        [pa.LargeListArray.from_arrays(offsets, values) for values in columns.values()], names=list(columns)
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
