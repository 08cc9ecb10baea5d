"""Backend stream's time and wear: the disk shows where computing does not cover it; small state and long steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.planner import show
from shardlab.planner.cost import Cost
from shardlab.planner.machine import GIB, Machine, parse_hardware
from shardlab.planner.resolve import resolve
from shardlab.planner.search import Survey, predictor, survey
from shardlab.recipe import Recipe
from tests.planner.test_cost import RATES

CONFIG = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704,
          "num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": False}  # fmt: skip
SMALL = {"masters": "bf16", "moments": "8bit", "gradients": "bf16"}


def recipe_of(directory: Path, batch: int = 4, **optimizer: Any) -> Recipe:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return Recipe.from_dict(
        {
            "model": {"config": str(directory / "config.json")},
            "data": {"sequence_length": 64, "tokenizer": "bytes"},
            "train": {"global_batch_size": batch, "precision": "fp32", "optimizer": optimizer},
            "shard": {"backend": "stream", "micro_batch": 1},
        }
    )


def machine_of(disk: float | None, tbw: float | None = None) -> Machine:
    rates = replace(RATES, overlaps=False, disk=disk)
    return Machine("test", 1, False, 8 * GIB, 8 * GIB, 1, rates, tbw)


def cost_of(directory: Path, disk: float | None, batch: int = 4, **optimizer: Any) -> Cost | None:
    recipe, machine = recipe_of(directory, batch, **optimizer), machine_of(disk)
    return predictor(recipe, machine).cost(resolve(recipe, world_size=1), machine)


def test_a_slow_disk_is_all_of_a_step_and_a_quick_one_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    moved = predictor(recipe, machine_of(1e6)).footprint(resolve(recipe, world_size=1)).disk
    slow, quick = cost_of(tmp_path, 1e6), cost_of(tmp_path, 1e15)
    assert moved is not None
    assert slow is not None
    assert quick is not None
    assert slow.seconds == pytest.approx((moved.read + moved.written) / 1e6, rel=1e-3)
    assert quick.parts["disk"] == 0
    assert quick.unhindered == 4
    assert {key: value for key, value in slow.parts.items() if key != "disk"} == {
        key: value for key, value in quick.parts.items() if key != "disk"
    }
    assert cost_of(tmp_path, None) is None


def test_a_step_as_long_as_it_says_does_not_wait(tmp_path: Path) -> None:
    rate = 2e9
    short = cost_of(tmp_path, rate)
    assert short is not None
    assert short.parts["disk"] > 0
    assert short.unhindered is not None
    assert short.unhindered > 4
    long, less = (cost_of(tmp_path, rate, batch) for batch in (short.unhindered, short.unhindered // 2))
    assert long is not None
    assert less is not None
    assert long.parts["disk"] == 0
    assert less.parts["disk"] > 0


def test_small_state_moves_less_and_so_waits_less(tmp_path: Path) -> None:
    full, small = cost_of(tmp_path, 1e6), cost_of(tmp_path, 1e6, **SMALL)
    assert full is not None
    assert small is not None
    # Of 20 bytes read and 16 written, 8 and 6: masters three times, moments, the gradient; written once each.
    assert small.seconds / full.seconds == pytest.approx(14 / 36, rel=0.05)


def surveyed(directory: Path, tbw: float | None, batch: int = 4) -> Survey:
    recipe, machine = recipe_of(directory, batch), machine_of(1e9, tbw)
    return survey(recipe, machine, resolve(recipe, world_size=1))


def test_wear_is_what_is_written_by_what_the_disk_bears(tmp_path: Path) -> None:
    found = surveyed(tmp_path, tbw=100.0)
    assert found.stream is not None
    disk, cost = found.stream.footprint.disk, found.stream.cost
    assert disk is not None
    assert cost is not None
    values = show.as_dict(found)["stream"]
    assert values["written_bytes_per_token"] == pytest.approx(disk.written / (4 * 64))
    assert values["disk_days"] == pytest.approx(100e12 / disk.written * cost.seconds / 86400)
    said = show.text(found)
    assert "rated for 100 TB written bears" in said
    assert f"{values['written_bytes_per_token'] / 1e6:,.3g} MB written for each token" in said
    assert f"from train.global_batch_size={cost.unhindered} on" in said
    longer = show.as_dict(surveyed(tmp_path, 100.0, batch=8))["stream"]
    assert longer["written_bytes_per_token"] < 0.51 * values["written_bytes_per_token"]


def test_without_a_rating_nothing_is_said_of_days(tmp_path: Path) -> None:
    found = surveyed(tmp_path, tbw=None)
    assert show.as_dict(found)["stream"]["disk_days"] is None
    assert "bears" not in show.text(found)


def test_a_users_hardware_may_name_its_disk(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    rates = {"bf16_tflops": 1, "memory_gb_per_s": 40, "disk_gb_per_s": 2}
    file.write_text(json.dumps({"mine": {"host_memory_gib_per_device": 16, "disk_tbw": 600, **rates}}))
    machine = parse_hardware("mine", file)
    assert machine.disk_tbw == 600
    assert machine.rates is not None
    assert machine.rates.disk == pytest.approx(1.5e9)
