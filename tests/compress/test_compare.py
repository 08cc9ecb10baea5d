"""Two directories beside each other: the card's figures again, by another way."""

import json
from pathlib import Path

import pytest

from shardlab.compress.compare import compare
from shardlab.compress.quantize import QuantizeConfig, quantize
from shardlab.compress.stage import Rows
from shardlab.errors import UserError
from shardlab.recipe import DataSection
from tests.compress.conftest import LENGTH


def test_it_finds_what_the_card_says(model: Path, text: Path, rows: Rows, tmp_path: Path) -> None:
    card = quantize(model, tmp_path / "out", QuantizeConfig("w8a8"), rows, LENGTH, lambda _: None)
    data = DataSection(files=(str(text),), tokenizer=str(model), sequence_length=LENGTH, evaluation_fraction=0.2)
    found = compare(model, tmp_path / "out", data)
    same = compare(model, model, data)
    assert (same.divergence, same.agreement, same.loss_before) == (0.0, 1.0, same.loss_after)
    assert found.perplexity_before == pytest.approx(same.perplexity_before, rel=1e-6)
    assert found.divergence == pytest.approx(card.figures["kl_divergence"], rel=0.25)  # of some rows there, of all here
    assert 0.5 < found.agreement < 1


def test_other_tokens_are_refused(model: Path, text: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/4562: ids of another vocabulary, and everything looks normal."""
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = DataSection(files=(str(text),), tokenizer=str(model), sequence_length=LENGTH, evaluation_fraction=0.2)
    with pytest.raises(UserError, match="the tokenizers differ: "):
        compare(model, other, data)
