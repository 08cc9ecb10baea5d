"""What a run takes around its steps: when a copy for saves is there, how many checkpoints are kept, and sizes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.backends.placement import Setting
from shardlab.plan import BackendName, Footprint, ModelShape, ParameterShape, Plan
from shardlab.planner.around import SHARD_BYTES, Saving, around, on_disk
from shardlab.planner.machine import Machine
from shardlab.planner.search import predictor
from shardlab.recipe import Recipe
from shardlab.state.masks import MASKS, Masks

SHAPE = ModelShape(
    (ParameterShape("embedding", (1000, 1000), True, 2), ParameterShape("block", (1000, 2000), False, 1)),
    1,
    has_tail=True,
)
SAVING = Saving(copies=True, during=True, checkpoints=3, whole_model=True)


def setting(backend: BackendName, ranks: int = 2, *, accelerator: bool = False, shape: ModelShape = SHAPE) -> Setting:
    plan = Plan(backend, ranks, 1, 1, ranks, "fp32", shared_memory=False)
    return Setting(shape, plan, 2, (), accelerator)


@pytest.mark.parametrize(
    ("checkpoint", "train", "copies", "during", "checkpoints"),
    [
        ({"every": 50}, {}, True, True, 3),
        ({"every": 100, "keep": 1}, {}, True, True, 2),
        ({"every": 200}, {}, True, False, 1),  # after the last step: no step is beside the copy
        ({"every": 201}, {}, False, False, 0),
        ({"every": None}, {}, False, False, 0),
        ({"every": 50, "asynchronous": False}, {}, False, True, 3),
        ({"every": 50}, {"stop_after": 60}, True, True, 2),
        ({"every": 20}, {"evaluate_every": 10}, True, True, 4),  # the best besides
    ],
)
def test_what_is_saved_when(
    checkpoint: dict[str, Any], train: dict[str, Any], copies: bool, during: bool, checkpoints: int
) -> None:
    asked = Recipe.from_dict({"train": {"steps": 200, **train}, "checkpoint": checkpoint})
    assert Saving.of(asked) == Saving(copies, during, checkpoints, whole_model=True)


def foreseen(directory: Path, *, keep_masks: bool = False, qat: Any = None, distill: Any = None) -> Footprint:
    """Of a step of a one-block Llama whose config is written to `directory`."""
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 256}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (directory / "config.json").write_text(json.dumps(config))
    model = {"path": str(directory), "keep_masks": keep_masks}
    recipe = {"model": model, "data": {"sequence_length": 16}, "train": {"qat": qat}, "distill": distill}
    machine = Machine("here", 1, False, 2**35, 2**35)
    plan = Plan("ddp", 1, 1, 1, 1, "fp32")
    return predictor(Recipe.from_dict(recipe), machine, vocabulary=64).footprint(plan)


def test_a_recipe_s_masks_and_rounding_are_in_its_footprint(tmp_path: Path) -> None:
    """Both by themselves: the lower end has the masks' file for no memory of the process."""
    stays = {"model.layers.0.mlp.up_proj.weight": torch.zeros(256, 64, dtype=torch.bool)}
    (tmp_path / MASKS).write_bytes(Masks.of(stays).dump())
    free, masked = foreseen(tmp_path), foreseen(tmp_path, keep_masks=True)
    assert masked.tensors - free.tensors == 256 * 64 // 8
    assert masked.high > free.high
    assert masked.low <= free.low
    assert masked.around is not None
    assert free.around is not None
    assert masked.around.checkpoint - free.around.checkpoint == 256 * 64 // 8
    rounded = foreseen(tmp_path, qat={"scheme": "int4g32"})
    assert rounded.tensors > free.tensors + 256 * 64 * 4  # a layer's rounded weight, at the least


def test_projections_of_hidden_states_are_trained_like_all_else(tmp_path: Path) -> None:
    alone, matched = (
        foreseen(tmp_path, distill={"teacher": str(tmp_path), "hidden": hidden})
        for hidden in (None, {"projection": True})
    )
    assert matched.bytes["moments"] - alone.bytes["moments"] == 64 * 64 * 8
    assert matched.bytes["parameters"] - alone.bytes["parameters"] == 64 * 64 * 4
    assert matched.tensors > alone.tensors + 64 * 64 * 16
    assert matched.around is not None
    assert alone.around is not None
    assert matched.around.checkpoint - alone.around.checkpoint == 64 * 64 * 12


@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero3", "fsdp"])
def test_the_disk_holds_masters_moments_and_what_is_frozen(backend: BackendName) -> None:
    assert on_disk(setting(backend), SAVING) == (1_000_000 * 12 + 2_000_000 * 4, 3_000_000 * 4)
    adapters_alone = replace(SAVING, whole_model=False)
    assert on_disk(setting(backend), adapters_alone)[1] == 1_000_000 * 4
    found = around(setting(backend), SAVING, 0, 0.0)
    assert found.disk == 3 * found.checkpoint + found.model


def test_on_an_accelerator_copies_and_files_are_the_hosts() -> None:
    on_cpu, on_device = (around(setting("fsdp", accelerator=a), SAVING, 0, 0.0) for a in (False, True))
    files = 3_000_000 * 4
    assert on_device.writing.host == files + on_device.snapshot
    assert on_cpu.writing.high == on_device.writing.high + files + on_cpu.snapshot
    assert on_cpu.writing.host == 0
    assert on_device.building.host == 2_000_000 * 4  # a tensor is made there


def test_of_a_large_model_one_file_is_collected_at_a_time() -> None:
    large = ModelShape((ParameterShape("block", (100_000, 40_000), True, 1),) * 4, 1, has_tail=True)
    found = around(setting("fsdp", 64, accelerator=True, shape=large), replace(SAVING, copies=False), 0, 0.0)
    assert found.writing.host == SHARD_BYTES + 100_000 * 40_000 * 4
    assert found.snapshot == 0
