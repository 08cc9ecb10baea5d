"""A corpus as token ids: encoded once, kept in an Arrow file, mapped into memory by whoever reads it.

Each stream is one Arrow IPC stream of one record batch with one column, `input_ids: large_list<uint16 or uint32>`, a
row a document: `datasets.Dataset.from_file` reads it, and the column's values and offsets are, without a copy,
all tokens in a row and where each document ends.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shardlab.data.cache import cached
from shardlab.data.corpus import Corpus, Document
from shardlab.data.split import SPLIT_RULE, Part, split
from shardlab.data.tokenizer import tokenizer_digest

COLUMN = "input_ids"
_FORMAT = 1  # raised when the files' content would come out differently
_BATCH_CHARACTERS = 1 << 20  # encoded at once, over all cores: some 130 bytes of the encoder's memory per token
_COPY_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenStream:
    """Token ids of documents one after the other, memory-mapped.

    `tokens`: `(n,)` uint16 or uint32. `ends`: `(documents,)` int64, rising: the position after each document's last.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedCorpus:
    """The streams of a corpus. `fingerprint` identifies text, tokenizer and split: equal means the same tokens."""

    train: TokenStream
    evaluation: TokenStream | None
    fingerprint: str


def tokenize_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, evaluation_fraction: float, cache: Path
) -> TokenizedCorpus:
    """Map the corpus's token streams, encoding it first if the cache hasn't got them.

    Each document ends in the tokenizer's eos token; no other special token is added, and text that spells one
    is encoded as text. One process of a host encodes, the others wait.
    Raises UserError if the text is too short to be split, or the cache cannot be written.
    """
    parts = f"{_FORMAT} {corpus.digest} {tokenizer_digest(tokenizer)} {evaluation_fraction!r} {SPLIT_RULE}"
    fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:32]

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
        documents = reader.read_next_batch().column(COLUMN)
    return TokenStream(
        documents.values.to_numpy(zero_copy_only=True), documents.offsets.to_numpy(zero_copy_only=True)[1:]
    )


def _write_streams(directory: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, fraction: float) -> None:
    """Encode to a raw file first: which documents are held out depends on all their lengths."""
    dtype = np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.uint32)
    raw = directory / "tokens.raw"
    with raw.open("wb") as file:
        lengths = _write_documents(file, corpus.documents, tokenizer, dtype)
    tokens = np.memmap(raw, dtype=dtype, mode="r")
    train, evaluation = split(lengths, fraction)
    if evaluation is None:
        _write_arrow(directory / "train.arrow", tokens, train.lengths)
    else:
        for name, part in (("train", train), ("evaluation", evaluation)):
            _write_part(directory, name, tokens, part)
    raw.unlink()


def _write_documents(
    file: BinaryIO, documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, dtype: np.dtype
) -> NDArray[np.int64]:
    """Write every document's ids and an eos after each; return the lengths `(documents,)`."""
    eos = np.array([tokenizer.eos_token_id], dtype=dtype)
    lengths = array("q")
    length = 0
    for ids, last in _encoded(documents, tokenizer):
        np.asarray(ids, dtype=dtype).tofile(file)
        length += len(ids)
        if last:
            eos.tofile(file)
            lengths.append(length + 1)
            length = 0
    return np.frombuffer(lengths, dtype=np.int64)


def _encoded(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], bool]]:
    """Ids of each piece of text, and whether it is its document's last, in order."""
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.no_truncation()  # a tokenizer saved with these on would cut or pad documents in silence
    encoder.no_padding()
    encoder.encode_special_tokens = True  # "<|endoftext|>" in a source file is text, not the end of a document
    for batch in _batches(documents):
        encodings = encoder.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, last) in zip(encodings, batch, strict=True):
            yield encoding.ids, last


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    characters = 0
    for document in documents:
        pieces = document.pieces()
        piece: str | None = next(pieces)  # a corpus has no empty documents
        while piece is not None:
            following = next(pieces, None)
            batch.append((piece, following is None))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
            piece = following
    if batch:
        yield batch


def _write_part(directory: Path, name: str, tokens: NDArray[np.unsignedinteger], part: Part) -> None:
    """Copy the part's spans together, then write them: an Arrow record batch wants its values in one piece."""
    raw = directory / f"{name}.raw"
    with raw.open("wb") as file:
        for start, end in part.spans:
            for position in range(start, end, _COPY_TOKENS):
                tokens[position : min(position + _COPY_TOKENS, end)].tofile(file)
    _write_arrow(directory / f"{name}.arrow", np.memmap(raw, dtype=tokens.dtype, mode="r"), part.lengths)
    raw.unlink()


def _write_arrow(path: Path, tokens: NDArray[np.unsignedinteger], lengths: NDArray[np.int64]) -> None:
    """Write from the mapping: the kernel pages the tokens in and out, they are never all resident."""
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), type=pa.int64())
    values = pa.Array.from_buffers(pa.from_numpy_dtype(tokens.dtype), len(tokens), [None, pa.py_buffer(tokens)])
    batch = pa.record_batch([pa.LargeListArray.from_arrays(offsets, values)], names=[COLUMN])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
