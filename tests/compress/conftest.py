"""A tiny model and text, made once: stages read them and never write there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab.compress.stage import Rows, read_rows
from shardlab.data.tokenizer import make_tokenizer
from shardlab.recipe import DataSection
from tests.train.support import TINY

LENGTH = 32


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compress-text") / "text.txt"
    path.write_text("".join(f"line {i} of {i * i % 97} lines\n" for i in range(900)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model directory with a tokenizer of bytes; fp32 weights that are not small, so that rounding shows."""

    def make(name: str, *, tied: bool = False, **values: int) -> Path:
        directory = tmp_path_factory.mktemp("compress") / name
        tokenizer = make_tokenizer("bytes", None, Path())  # type: ignore[arg-type]
        sizes = {**TINY, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, **values}
        config = LlamaConfig(**sizes, tie_word_embeddings=tied, initializer_range=0.08)
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("plain")


@pytest.fixture(scope="session")
def tied(make_model: Callable[..., Path]) -> Path:
    return make_model("tied", tied=True)


@pytest.fixture(scope="session")
def rows(model: Path, text: Path) -> Rows:
    data = DataSection(files=(str(text),), tokenizer=str(model), sequence_length=LENGTH, evaluation_fraction=0.2)
    return read_rows(data, calibration=24, held_out=16)
