"""From a recipe's data section to rows: corpus, tokenizer, tokens, split, packing."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from shardlab.data.cache import cache_root
from shardlab.data.corpus import Corpus, files_corpus, stdlib_corpus
from shardlab.data.packing import PackedRows
from shardlab.data.tokenizer import make_tokenizer
from shardlab.data.tokens import TokenStream, tokenize_corpus


class DataSettings(Protocol):
    """What `prepare_data` reads of the recipe's data section."""

    @property
    def source(self) -> str | None: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def evaluation_files(self) -> Sequence[str]: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def evaluation_fraction(self) -> float: ...
    @property
    def cache_dir(self) -> str | None: ...


@dataclass(frozen=True)
class PreparedData:
    """Train and evaluation rows. `documents` and the token counts are of the text, before packing.

    `fingerprint` identifies text, tokenizer and split: runs with the same one see the same tokens. It does not depend
    on where the files lie, nor on any seed.
    """

    tokenizer: PreTrainedTokenizerFast
    train: PackedRows
    evaluation: PackedRows | None
    documents: int
    train_tokens: int
    evaluation_tokens: int
    fingerprint: str


def prepare_data(section: DataSettings) -> PreparedData:
    """Read, tokenise (or map what the cache has), split and pack the text of a recipe's `data`.

    Every rank calls it; one process of a host does the work, the others wait. The vocabulary's size is
    `len(tokenizer)`.
    Raises UserError for unusable files or tokenizer, a text too short to split, or a cache that cannot be written.
    """
    cache = cache_root(section.cache_dir)
    corpus = _corpus(section)
    tokenizer = make_tokenizer(section.tokenizer, corpus, cache)
    if section.evaluation_files:
        held_out = files_corpus(section.evaluation_files, key="data.evaluation_files")
        train = tokenize_corpus(corpus, tokenizer, 0.0, cache)
        other = tokenize_corpus(held_out, tokenizer, 0.0, cache)
        evaluation: TokenStream | None = other.train
        fingerprint = hashlib.sha256(f"{train.fingerprint} {other.fingerprint}".encode()).hexdigest()[:32]
        documents = len(corpus.documents) + len(held_out.documents)
    else:
        train = tokenize_corpus(corpus, tokenizer, section.evaluation_fraction, cache)
        evaluation = train.evaluation
        fingerprint = train.fingerprint
        documents = len(corpus.documents)

    def rows(stream: TokenStream) -> PackedRows:
        return PackedRows(stream, sequence_length=section.sequence_length, eos=tokenizer.eos_token_id)

    return PreparedData(
        tokenizer=tokenizer,
        train=rows(train.train),
        evaluation=rows(evaluation) if evaluation is not None else None,
        documents=documents,
        train_tokens=len(train.train.tokens),
        evaluation_tokens=len(evaluation.tokens) if evaluation is not None else 0,
        fingerprint=fingerprint,
    )


def _corpus(section: DataSettings) -> Corpus:
    return files_corpus(section.files) if section.files else stdlib_corpus()
