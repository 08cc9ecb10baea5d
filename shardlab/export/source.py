"""The model directory that is exported: its config, its weights one tensor at a time, its tokenizer."""

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardlab.checkpoint.listing import hidden_name
from shardlab.compress.stage import source_config
from shardlab.errors import UserError
from shardlab.model.build import build_shell
from shardlab.model.checkpoint import directory_weights
from shardlab.model.deferred import Weights
from shardlab.recipe import ModelSection


@dataclass(frozen=True)
class Source:
    """A model directory, opened: nothing of its weights is in memory."""

    directory: Path
    config: Any  # transformers'
    shapes: dict[str, torch.Size]  # by canonical name: a tied tensor once
    weights: Weights
    tokenizer: Any  # a transformers fast tokenizer

    @property
    def rows(self) -> int:
        """Of the embedding: the ids that the model knows."""
        return int(self.config.vocab_size)

    @property
    def parameters(self) -> int:
        """Elements of all its tensors."""
        return sum(shape.numel() for shape in self.shapes.values())


class _NoFreshRows:
    """Where training would enlarge a vocabulary, an export has nothing to put."""

    def __init__(self, directory: Path):
        self._directory = directory

    def tensor(self, name: str) -> Tensor:
        """Raises UserError: rows of `name` are missing."""
        raise UserError(f"{self._directory}: {name} has fewer rows in the file than config.json's vocab_size says")


def open_source(directory: Path) -> Source:
    """Open a model directory for export.

    Raises UserError where it is none, holds adapters or quantized weights, has no tokenizer with an end-of-text token,
    or its tokenizer knows more tokens than the embedding has rows.
    """
    source_config(directory)
    model: Any = build_shell(ModelSection(path=str(directory)), vocabulary=0, sequence_length=1)
    tokenizer = _tokenizer(directory)
    tokens, rows = 1 + max(tokenizer.get_vocab().values()), int(model.config.vocab_size)
    if tokens > rows:
        raise UserError(
            f"{directory}: the tokenizer has {tokens} tokens, the model's embedding {rows} rows; train the added "
            "tokens (training with this tokenizer enlarges the embedding), or remove them"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return Source(
        directory, model.config, shapes, directory_weights(directory, model, _NoFreshRows(directory)), tokenizer
    )


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a directory that holds no tokenizer
        raise UserError(f"transformers finds no tokenizer in {directory}; save the model's there") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not tokenizer.get_vocab():
        raise UserError(f"{directory} holds no fast tokenizer (a tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {directory} has no eos token: a runtime would not know where a text ends")
    return tokenizer


def require(module: str) -> ModuleType:
    """An optional library. Raises UserError naming what installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"this needs {module.split('.')[0]}: pip install 'shardlab[export]'") from error


@contextmanager
def under_final_name(output: Path) -> Iterator[Path]:
    """A temporary path beside `output`, renamed to it if nothing fails, and otherwise removed.

    Raises UserError if `output` exists.
    """
    if output.exists():
        raise UserError(f"{output} exists; it is never overwritten. Remove it or choose another name")
    output.parent.mkdir(parents=True, exist_ok=True)
    # The ending stays: runtimes go by it.
    partial = output.with_name(hidden_name(output.stem, "partial") + output.suffix)
    try:
        yield partial
        partial.rename(output)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
