"""`shardlab plan`: the survey of candidates, its choice, and the command."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.errors import UserError
from shardlab.plan import Offload, Plan
from shardlab.planner import resolve, show
from shardlab.planner.explain import reasons
from shardlab.planner.machine import GIB, Machine, parse_hardware
from shardlab.planner.predict import Predictor
from shardlab.planner.rates import Rates
from shardlab.planner.search import BACKENDS, candidates, predictor, survey
from shardlab.planner.survey import survey_for
from shardlab.recipe import Recipe

TINY = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 344,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}  # fmt: skip


_TABLED = parse_hardware("H100-80G").rates
assert _TABLED is not None
TABLED = _TABLED


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def recipe(config: Path, **train: object) -> Recipe:
    return Recipe.from_dict(
        {
            "model": {"config": str(config)},
            "data": {"tokenizer": "bytes", "sequence_length": 128},
            "train": {"global_batch_size": 8, **train},
        }
    )


@pytest.fixture(scope="module")
def predict(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Of the tiny model on a CPU: its traces serve every test."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return predictor(recipe(path), machine(GIB))


def machine(bytes_: int, ranks: int = 2, accelerator: bool = False) -> Machine:
    return Machine("test", ranks, accelerator, bytes_, 64 * GIB)


def test_a_roomy_machine_recomputes_and_shards_nothing(config: Path, predict: Predictor) -> None:
    best = survey(recipe(config), machine(64 * GIB), predict=predict).best
    assert best is not None
    assert (best.plan.backend, best.plan.recompute, best.plan.micro_batch) == ("ddp", "none", 4)


def test_a_tight_one_takes_what_fits_at_the_intervals_upper_end(config: Path, predict: Predictor) -> None:
    roomy = survey(recipe(config), machine(64 * GIB), predict=predict)
    needs = {c.plan.backend: c.footprint.high + c.footprint.libraries for c in roomy.candidates}
    limit = min(needs.values()) + (20 << 20)
    tight = survey(recipe(config), machine(limit), predict=predict)
    assert tight.best is not None
    assert tight.best.footprint.high + tight.best.footprint.libraries <= limit
    assert any(not candidate.fits for candidate in tight.candidates)


def test_where_nothing_fits_it_says_by_how_much(config: Path, predict: Predictor) -> None:
    found = survey(recipe(config), machine(200 << 20), predict=predict)
    assert found.best is None
    assert "nothing fits; the nearest is" in show.text(found)
    assert "over by" in show.text(found)


def test_offload_is_offered_where_there_is_another_memory(config: Path) -> None:
    base = resolve(recipe(config), world_size=2)
    assert all(plan.offload == Offload() for plan in candidates(base, machine(GIB)))
    offered = {p.backend for p in candidates(base, machine(GIB, accelerator=True)) if p.offload != Offload()}
    assert offered == {"zero1", "zero2", "zero3", "fsdp"}


def test_the_vocabulary_shows_in_the_head_and_not_as_whole_logits(config: Path) -> None:
    """Whole logits of 1024 tokens and 64k entries would be 256 MiB; the loss takes 256 tokens at a time."""
    config.write_text(json.dumps({**TINY, "vocab_size": 65536}))
    asked = recipe(config, precision="fp32")
    plan = Plan("ddp", 1, 8, 1, 8, "fp32")
    moments = predictor(asked, machine(GIB)).moments(plan)
    head = next(m for m in moments if m.name == "forward pass of the head and the loss")
    assert 2 * 64 << 20 < head.bytes["temporaries"] < 1024 * 65536 * 4


def test_adapters_alone_have_optimizer_state(tmp_path: Path) -> None:
    """No weights lie in the directory: a plan reads none."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    asked = Recipe.from_dict(
        {
            "model": {"path": str(tmp_path), "lora": {"rank": 4}},
            "data": {"tokenizer": "bytes", "sequence_length": 64},
            "train": {"global_batch_size": 2, "precision": "fp32"},
        }
    )
    predict = predictor(asked, machine(GIB))
    adapters = predict.shape.numel(trainable=True)
    assert 0 < adapters < predict.shape.numel() / 20
    for backend in BACKENDS:
        footprint = predict.footprint(Plan(backend, 2, 1, 1, 2, "fp32"))
        assert 0 < footprint.bytes["moments"] <= adapters * 8


def test_hardware_is_named_and_can_be_added_to(tmp_path: Path) -> None:
    found = parse_hardware("8xH100-80G")
    assert (found.ranks, found.accelerator) == (8, True)
    own = tmp_path / "own.json"
    own.write_text('{"BIG": {"device_memory_gib": 100, "host_memory_gib_per_device": 10}}')
    assert parse_hardware("BIG", own).memory_bytes == 100 * GIB
    with pytest.raises(UserError, match="no preset is named 'H1000'"):
        parse_hardware("2xH1000")
    own.write_text('{"BIG": {"memory": 100}}')
    with pytest.raises(UserError, match="unknown key"):
        parse_hardware("BIG", own)


def test_hardware_may_be_several_nodes(tmp_path: Path) -> None:
    found = parse_hardware("2x8xH100-80G")
    assert (found.ranks, found.nodes) == (16, 2)
    assert (parse_hardware("64xH100-80G").nodes, parse_hardware("4xH100-80G").nodes) == (8, 1)
    assert (found.with_ranks(32).nodes, found.with_ranks(8).nodes) == (4, 1)
    own = tmp_path / "own.json"
    own.write_text('{"PC": {"device_memory_gib": 24, "host_memory_gib_per_device": 64, "devices_per_node": 2}}')
    assert parse_hardware("8xPC", own).nodes == 4
    assert parse_hardware("8xPC", own).rates is None
    with pytest.raises(UserError, match="no preset"):
        parse_hardware("0x8xH100-80G")


FAST = replace(TABLED, link=dict.fromkeys(TABLED.link, 1e12))


def timed(bytes_: int, rates: Rates) -> Machine:
    return replace(machine(bytes_), rates=rates)


def test_the_fastest_that_fits_is_chosen_and_the_rule_decides_among_equals(config: Path, predict: Predictor) -> None:
    found = survey(recipe(config), timed(64 * GIB, FAST), predict=predict)
    best = found.best
    assert best is not None
    assert best.cost is not None
    fastest = min(c.cost.seconds for c in found.candidates if c.fits and c.cost is not None)
    assert best.cost.seconds <= fastest * 1.01
    assert best.plan.recompute == "none"
    assert "within 1%" in found.rule
    slow = replace(FAST, link=dict.fromkeys(FAST.link, 1e6))
    by_links = survey(recipe(config), timed(64 * GIB, slow), predict=predict)
    least = min(c.cost.parts["communication"] for c in by_links.candidates if c.cost is not None)
    assert by_links.best is not None
    assert by_links.best.cost is not None
    assert by_links.best.cost.parts["communication"] == pytest.approx(least, rel=0.01)


def test_the_front_holds_what_nothing_beats_in_both(config: Path, predict: Predictor) -> None:
    found = survey(recipe(config), timed(64 * GIB, FAST), predict=predict)
    front = found.front
    assert len(front) > 1
    for candidate in found.candidates:
        beaten = [
            c
            for c in front
            if c.cost is not None
            and candidate.cost is not None
            and c.cost.seconds <= candidate.cost.seconds
            and c.left_bytes >= candidate.left_bytes
        ]
        assert beaten or not candidate.fits
    for one, other in pairwise(front):
        assert one.cost is not None
        assert other.cost is not None
        assert one.cost.seconds <= other.cost.seconds
        assert one.left_bytes < other.left_bytes


def test_each_that_was_not_chosen_has_a_reason(config: Path, predict: Predictor) -> None:
    roomy = survey(recipe(config), timed(64 * GIB, FAST), predict=predict)
    fastest = roomy.front[0]
    needs = fastest.footprint.high + fastest.footprint.libraries
    found = survey(recipe(config), timed(needs - 1, FAST), predict=predict)
    assert found.best is not None
    said = {id(candidate): why for candidate, why in reasons(found)}
    for candidate in found.candidates:
        if candidate is found.best:
            assert id(candidate) not in said
        elif not candidate.fits:
            assert said[id(candidate)].startswith("does not fit, over by")
        else:
            assert re.search(r"\d% slower, most of it|as fast, and comes later", said[id(candidate)])
    text = show.text(found, explain=True)
    assert all(why in text for why in said.values())
    assert "would be faster" in text


def test_without_a_known_speed_the_rule_stays_and_says_so(config: Path, predict: Predictor) -> None:
    found = survey(recipe(config), machine(64 * GIB), predict=predict)
    assert not found.timed
    assert found.front == []
    text = show.text(found, explain=True)
    assert "nothing is known of this hardware's speed" in text
    assert "tokens/s" not in text


def test_neither_recipe_nor_model_is_an_error() -> None:
    with pytest.raises(UserError, match="give a recipe, or --model"):
        survey_for(None, (), None, None, None, None, None)


def test_the_command_prints_a_table_and_json(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(config).model_dump_json())
    run = CliRunner().invoke(app, ["plan", str(file), "--nproc", "2", "--set", "shard.backend=zero2"])
    assert run.exit_code == 0, run.output
    assert "the recipe's own plan, zero2" in run.output
    assert re.search(r"around the steps of zero2.*host memory.*2 checkpoints of", run.output)
    assert "fastest that fits" in run.output
    assert "tokens/s" in run.output
    asked = ["plan", "--model", str(config), "--seq", "256", "--hardware", "8xH100-80G", "--json"]
    run = CliRunner().invoke(app, asked)
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    assert found["parameters"] > 1e6
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp"} == {c["backend"] for c in found["candidates"]}
    assert found["machine"]["nodes"] == 1
    assert found["best"]["cost"]["seconds"] == pytest.approx(sum(found["best"]["cost"]["parts"].values()))
    assert any(c["on_front"] for c in found["candidates"])
    for candidate in found["candidates"]:
        footprint = candidate["footprint"]
        assert footprint["low"] <= footprint["middle"] <= footprint["high"]
        assert footprint["tensors"] == sum(footprint["bytes"].values())


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_in_little_memory(tmp_path: Path) -> None:
    """Half a terabyte of state; nothing of it is made. How long it takes is a benchmark's matter."""
    llama = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672,
             "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama))
    asked = ["plan", "--model", str(path), "--seq", "2048", "--hardware", "64xH100-80G", "--json"]
    process = subprocess.Popen([sys.executable, "-m", "shardlab", *asked], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _pid, process.returncode, used = os.wait4(process.pid, 0)
    assert process.returncode == 0
    assert found["parameters"] == pytest.approx(69e9, rel=0.01)
    assert found["best"]["backend"] in ("fsdp", "zero3")
    assert used.ru_maxrss * 1024 < 2 * GIB
