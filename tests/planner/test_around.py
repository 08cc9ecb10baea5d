"""What a run takes around its steps: when a copy for saves is there, how many checkpoints are kept, and sizes."""

from dataclasses import replace
from typing import Any

import pytest

from shardlab.backends.placement import Setting
from shardlab.plan import BackendName, ModelShape, ParameterShape, Plan
from shardlab.planner.around import SHARD_BYTES, Saving, around, on_disk
from shardlab.recipe import Recipe

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
