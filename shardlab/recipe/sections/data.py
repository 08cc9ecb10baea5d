"""The recipe's `data`: the text, and how it becomes sequences of tokens."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveInt, field_validator, model_validator

from shardlab.recipe.sections.base import BelowOne, Names, Section

TOKENIZER_NAMES = re.compile(r"bytes|bpe-[1-9]\d*k")


class ColumnNames(Section):
    """Where a record of JSONL, Parquet or a dataset has what `data.format` needs."""

    text: str = "text"
    """With format text."""
    prompt: str = "prompt"
    """With format instruct: what is given."""
    completion: str = "completion"
    """With format instruct: what is learned."""
    messages: str = "messages"
    """With format chat: a list of {role, content}."""


class DataSection(Section):
    """The text to train on, and how it becomes sequences of tokens."""

    source: Literal["stdlib"] | None = None
    """stdlib: the source text of Python's standard library; the default when no files are given."""
    files: Names = ()
    """Files or globs, used instead of a source: text, .jsonl, .parquet, or the directory of a saved dataset."""
    builder: str | None = None
    """"package.module:function" returns (training rows, evaluation rows), for a model that is no language model."""
    evaluation_files: Names = ()
    """Files or globs held out for evaluation, used instead of `evaluation_fraction`."""
    format: Literal["text", "instruct", "chat"] = "text"
    """text: every token is learned. instruct: completions are. chat: what the assistant says is."""
    columns: ColumnNames = ColumnNames()
    on_bad_record: Literal["error", "skip", "replace"] = "error"
    """What is done about records that are empty, not UTF-8, cut off and so on. replace: mend what can be mended."""
    max_record_bytes: PositiveInt = 1_000_000
    """A longer line of JSONL or text in a row is a bad record; text files may have any length."""
    tokenizer: str = "bpe-8k"
    """bytes, bpe-<N>k (trained on the corpus, N thousand entries, cached), or a Hugging Face tokenizer directory."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence."""
    packing: bool = True
    """Several documents in a row; false: one document in a row, truncated or padded."""
    streaming: bool = False
    """Tokenise while training, and keep no tokens on disk."""
    evaluation_fraction: BelowOne = 0.02
    """Share of the corpus held out for evaluation."""
    cache_dir: str | None = None
    """Where tokenised text is kept; null is the user's cache directory."""

    @model_validator(mode="before")
    @classmethod
    def _default_source(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and not raw.get("files") and not raw.get("builder") and raw.get("source") is None:
            return {**raw, "source": "stdlib"}
        return raw

    @model_validator(mode="after")
    def _two_corpora_at_once(self) -> "DataSection":
        if self.builder is not None and (self.source is not None or self.files):
            raise ValueError("builder brings rows of its own; leave source and files out")
        if self.source is not None and self.files:
            raise ValueError("source and files are both given; keep one (source: null trains on the files)")
        return self

    @model_validator(mode="after")
    def _prompts_in_plain_text(self) -> "DataSection":
        if self.source is not None and self.format != "text":
            raise ValueError(f"format {self.format} needs files of records (.jsonl, .parquet, a dataset), not a source")
        return self

    @model_validator(mode="after")
    def _fraction_of_a_stream(self) -> "DataSection":
        if self.streaming and self.evaluation_fraction and not self.evaluation_files:
            raise ValueError(
                "streaming can't hold out a fraction of what it has not read; give evaluation_files, or set "
                "evaluation_fraction to 0"
            )
        return self

    @field_validator("tokenizer")
    @classmethod
    def _misspelled_vocabulary_size(cls, tokenizer: str) -> str:
        if not tokenizer:
            raise ValueError("expected bytes, bpe-<N>k such as bpe-8k, or a directory, got nothing")
        if tokenizer.startswith("bpe") and not TOKENIZER_NAMES.fullmatch(tokenizer):
            raise ValueError(f'expected bpe-<N>k such as bpe-8k, got "{tokenizer}"')
        return tokenizer
