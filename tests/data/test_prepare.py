import numpy as np
import pytest

from shardlab.data import IGNORED, prepare_data
from shardlab.errors import UserError

LINES = [f"line {number} of the text\n" for number in range(30)]


def test_the_rows_are_the_text(section, write_text):
    data = prepare_data(section(write_text("".join(LINES)), evaluation_fraction=0.0))
    targets = data.train.batch(range(len(data.train)))["targets"]
    assert data.tokenizer.decode(targets[targets != IGNORED]) == "".join(LINES)[1:] + "<|endoftext|>"
    assert (data.evaluation, data.evaluation_tokens, data.documents) == (None, 0, 1)
    assert data.train_tokens == len("".join(LINES)) + 1


def test_a_fraction_is_held_out(section, write_text):
    data = prepare_data(section(write_text(*LINES), evaluation_fraction=0.2))
    assert data.evaluation is not None
    total = sum(len(line) + 1 for line in LINES)
    assert data.train_tokens + data.evaluation_tokens == total
    assert data.evaluation_tokens == pytest.approx(0.2 * total, rel=0.2)
    assert data.documents == 30


def test_evaluation_files_are_the_evaluation_text(section, write_text):
    train, held = write_text("the training text"), write_text("held out", directory="held")
    data = prepare_data(section(train, evaluation_files=held, evaluation_fraction=0.5))
    assert (data.train_tokens, data.evaluation_tokens, data.documents) == (18, 9, 2)
    assert data.fingerprint != prepare_data(section(train, evaluation_fraction=0.0)).fingerprint


def test_a_missing_evaluation_file_names_its_key(section, write_text):
    with pytest.raises(UserError, match=r"data\.evaluation_files: .*missing"):
        prepare_data(section(write_text("text"), evaluation_files=("missing.txt",)))


def test_a_second_run_gives_the_same_rows(section, write_text):
    recipe = section(write_text(*LINES), tokenizer="bpe-1k")
    first, second = prepare_data(recipe), prepare_data(recipe)
    assert first.fingerprint == second.fingerprint
    for key, values in first.train.batch(range(len(first.train))).items():
        assert np.array_equal(values, second.train.batch(range(len(second.train)))[key])
