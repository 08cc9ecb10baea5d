"""`shardlab distill`: a student of the teacher's own blocks, or another; its card; and going on after a stop."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from shardlab.compress.card import read_card
from shardlab.compress.compare import compare
from shardlab.recipe import DataSection
from tests.train.support import Ended, losses, shardlab

STEPS = ("train.steps=6", "train.global_batch_size=4", "train.precision=fp32", "train.schedule.warmup_steps=0")


def distill(teacher: Path, output: Path, text: Path, *arguments: str, steps: tuple[str, ...] = STEPS) -> Ended:
    settings = [*steps, f"data.files=[{text}]", "data.sequence_length=32", "data.evaluation_fraction=0.2"]
    settings += [f"data.cache_dir={output.parent / 'cache'}"]
    return shardlab("distill", teacher, output, *arguments, *(f"--set={one}" for one in settings))


def test_half_of_the_teacher_s_blocks_learn_from_the_whole(model: Path, text: Path, tmp_path: Path) -> None:
    ended = distill(model, tmp_path / "out", text, "--layers", "1", "--temperature", "2", "--weight", "1", "--json")
    assert ended.code == 0, ended.err
    card = read_card(tmp_path / "out" / "model")
    assert card is not None
    assert (card["stage"], card["source"], card["config"]["temperature"]) == ("distill", "plain", 2.0)
    assert [stage["stage"] for stage in card["lineage"]] == ["prune"]
    assert json.loads(ended.out.splitlines()[-1]) == card["figures"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config.num_hidden_layers == 1
    data = DataSection(files=(str(text),), tokenizer=str(model), sequence_length=32, evaluation_fraction=0.2)
    found, cut = (compare(model, tmp_path / directory, data, rows=128) for directory in ("out/model", "out-student"))
    assert card["figures"]["kl_divergence"] == pytest.approx(found.divergence, rel=1e-6)
    assert found.divergence < cut.divergence, "six steps bring it nearer to the teacher than the cut had left it"


def test_from_a_cache(model: Path, text: Path, tmp_path: Path) -> None:
    """Which the card says without the place; the second time the teacher does not speak."""
    arguments = ("--layers", "1", "--cache", str(tmp_path / "said"))
    ended = distill(model, tmp_path / "out", text, *arguments)
    assert ended.code == 0, ended.err
    assert "the teacher speaks of" in ended.out
    card = read_card(tmp_path / "out" / "model")
    assert card is not None
    assert card["config"]["cache_top_k"] == 64
    assert "cache" not in card["config"]
    ended = distill(model, tmp_path / "again", text, "--student", str(tmp_path / "out-student"), *arguments[2:])
    assert ended.code == 0, ended.err
    assert "the teacher speaks of" not in ended.out
    assert losses(tmp_path / "again") == losses(tmp_path / "out")


def test_it_stops_and_goes_on(model: Path, text: Path, tmp_path: Path) -> None:
    """The student that was cut is not cut again; the whole run is that of one that was not stopped."""
    assert distill(model, tmp_path / "whole", text, "--layers", "1").code == 0
    stopping = (*STEPS, "train.stop_after=3")
    ended = distill(model, tmp_path / "cut", text, "--layers", "1", steps=stopping)
    assert ended.code == 0, ended.err
    assert not (tmp_path / "cut" / "model").exists()
    ended = distill(model, tmp_path / "cut", text, "--layers", "1", "--resume", "auto")
    assert ended.code == 0, ended.err
    assert "as it was cut before" in ended.out
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert read_card(tmp_path / "cut" / "model") is not None


def test_a_student_of_another_size(model: Path, text: Path, tmp_path: Path) -> None:
    """From a config, with a head that is padded otherwise; and one that is narrower in each way."""
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": 32, "head_dim": 8, "vocab_size": 264, "architectures": None}
    (tmp_path / "small.json").write_text(json.dumps(config))
    ended = distill(model, tmp_path / "small", text, "--student", str(tmp_path / "small.json"))
    assert ended.code == 0, ended.err
    assert "the teacher's head has 320 rows, the student's 264" in ended.out
    assert "teacher -> student:\nperplexity" in ended.out
    ended = distill(model, tmp_path / "thin", text, "--channels", "48", "--groups", "1")
    assert ended.code == 0, ended.err
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "thin" / "model").config
    assert (loaded.intermediate_size, loaded.num_key_value_heads, loaded.num_hidden_layers) == (48, 1, 2)


def test_what_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--layers", "1", "--student", str(model)), "give one"),
        (("--layers", "2"), "--keep 2"),
        (("--layers", "1", "--loss", "mse"), "distill.loss"),
    ):
        ended = distill(model, tmp_path / "out", text, *arguments)
        assert ended.code == 2, ended.err
        assert message in ended.err
    assert shardlab("distill", model, tmp_path / "out").code == 2
    assert not (tmp_path / "out").exists()
