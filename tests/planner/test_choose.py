"""`shard.backend: auto`: the survey's best of what the recipe leaves open."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.plan import Plan
from shardlab.planner import resolve
from shardlab.planner.choose import agreeing, choose, is_open
from shardlab.planner.machine import GIB, Machine, parse_hardware
from shardlab.planner.predict import Predictor
from shardlab.planner.search import predictor, survey
from shardlab.planner.survey import survey_for
from shardlab.recipe import Recipe
from tests.planner.test_plan import TINY, machine

RATES = parse_hardware("H100-80G").rates


def recipe(config: Path, **shard: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "model": {"config": str(config)},
            "data": {"tokenizer": "bytes", "sequence_length": 128},
            "train": {"global_batch_size": 12},
            "shard": shard,
        }
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def predict(config: Path) -> Predictor:
    return predictor(recipe(config), machine(GIB))


def chosen(asked: Recipe, on: Machine, predict: Predictor) -> Plan:
    ruled = resolve(asked, world_size=on.ranks)
    return choose(survey(asked, on, ruled, predict, keep=agreeing(asked, ruled)), ruled)


@pytest.mark.slow
def test_auto_is_the_fastest_that_fits(config: Path, predict: Predictor) -> None:
    """What `shardlab plan` calls the best, of the recipe's own recompute and offload."""
    timed = replace(machine(64 * GIB), rates=RATES)
    asked = recipe(config)
    plan = chosen(asked, timed, predict)
    best = survey(asked, timed, resolve(asked, world_size=2), predict).best
    assert best is not None
    assert best.plan.recompute == plan.recompute == "none"
    assert plan == replace(best.plan, reasons=plan.reasons)
    backend, size = plan.reasons
    assert backend.startswith(f"backend auto = {plan.backend}: the fastest that fits; {plan.backend}, micro-batch")
    assert "tokens/s" in backend
    assert size == f"micro_batch auto = {plan.micro_batch}, with it"


def test_less_memory_makes_it_shard(config: Path, predict: Predictor) -> None:
    asked = recipe(config, micro_batch=1)
    roomy = chosen(asked, machine(64 * GIB), predict)
    assert roomy.backend == "ddp"
    assert "the first that fits" in roomy.reasons[0]
    by_backend = {
        c.plan.backend: c.footprint.highest + c.footprint.libraries
        for c in survey(asked, machine(64 * GIB), predict=predict).candidates
        if (c.plan.micro_batch, c.plan.recompute) == (1, "none")
    }
    tight = chosen(asked, machine(by_backend["fsdp"]), predict)
    assert by_backend[tight.backend] <= by_backend["fsdp"] < by_backend["ddp"]


def test_what_the_recipe_says_stands(config: Path, predict: Predictor) -> None:
    """A micro-batch that is none of those that a survey tries, too."""
    asked = recipe(config, micro_batch=3, recompute="full", reshard_after_forward=False)
    plan = chosen(asked, replace(machine(64 * GIB), rates=RATES), predict)
    assert (plan.micro_batch, plan.accumulation, plan.recompute, plan.reshard_after_forward) == (3, 2, "full", False)
    assert not any("micro_batch auto" in reason for reason in plan.reasons)
    for fixed in (recipe(config, backend="zero2"), recipe(config, replicas=2)):
        assert not is_open(fixed, resolve(fixed, world_size=2))


def test_what_is_to_be_recomputed_is_left_to_be_found(config: Path, predict: Predictor) -> None:
    """Within the recipe's limit, which here only sharded blocks that are run again keep."""
    asked = recipe(config, micro_batch=1, recompute="auto", memory_limit="64GiB")
    roomy = chosen(asked, machine(64 * GIB), predict)
    assert (roomy.backend, roomy.recompute_fits, roomy.memory_limit) == ("ddp", True, 64 * GIB)
    needs = {
        (c.plan.backend, c.plan.recompute): c.footprint.highest + c.footprint.libraries
        for c in survey(asked, machine(64 * GIB), predict=predict).candidates
        if c.plan.micro_batch == 1
    }
    limit = f"{needs['fsdp', 'none'] / 1024:.3f}KiB"
    tight = chosen(recipe(config, micro_batch=1, recompute="auto", memory_limit=limit), machine(64 * GIB), predict)
    assert (
        min(needs[tight.backend, again] for again in ("none", "full")) <= needs["fsdp", "none"] < needs["ddp", "full"]
    )


def test_where_nothing_fits_it_misses_by_the_least(config: Path, predict: Predictor) -> None:
    plan = chosen(recipe(config), machine(200 << 20), predict)
    assert plan.micro_batch == 1
    assert plan.reasons[0].startswith(f"backend auto = {plan.backend}: nothing fits; the nearest, {plan.backend}")


def test_one_rank_whose_state_does_not_fit_streams_it(config: Path) -> None:
    config = config.with_name("large.json")
    config.write_text(json.dumps({**TINY, "hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 2048}))
    asked = recipe(config, micro_batch=1)
    predict = predictor(asked, machine(GIB, ranks=1))
    plan = chosen(asked, machine(700 << 20, ranks=1), predict)
    assert (plan.backend, plan.recompute) == ("stream", "full")
    assert "its state goes to the disk" in plan.reasons[0]
    assert chosen(asked, machine(64 * GIB, ranks=1), predict).backend == "ddp"


@pytest.mark.slow
def test_the_command_shows_what_auto_becomes(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(config).model_dump(mode="json")))
    found = survey_for(file, [], None, None, 2, None, None)
    assert found.own is not None
    assert found.best is not None
    assert found.own.plan.reasons[0].startswith(f"backend auto = {found.own.plan.backend}: the fastest that fits")
    assert replace(found.own.plan, reasons=()) == found.best.plan
