"""Any module: the digits classifier, its rows and their augmentation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes.digits import model, rows
from shardlab.data import WindowLoader
from tests.distributed.pool import Pools
from tests.train.support import losses, shardlab

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.yaml"


def loader(rank: int, world_size: int, start_step: int = 0) -> WindowLoader:
    training, _ = rows()
    layout = {"global_batch_size": 8, "micro_batch": 2, "seed": 3, "steps": 3}
    return WindowLoader(training, rank=rank, world_size=world_size, start_step=start_step, **layout)


def images(windows: WindowLoader) -> torch.Tensor:
    return torch.cat([batch.tensors["images"] for window in windows for batch in window.micro_batches])


def test_augmentation_is_the_same_at_every_world_size_and_after_a_resume() -> None:
    alone = images(loader(0, 1)).view(3, 8, -1)
    halves = torch.cat([images(loader(rank, 2)).view(3, 4, -1) for rank in (0, 1)], dim=1)
    assert torch.equal(alone, halves)
    assert torch.equal(images(loader(0, 1, start_step=2)).view(1, 8, -1)[0], alone[2])


def test_augmentation_differs_between_samples_and_between_epochs() -> None:
    training, _ = rows()
    seeds = np.array([5, 6], dtype=np.uint64)
    first, second = training.batch_at(np.array([0, 0]), seeds)["images"]
    assert not torch.equal(first, second)


def test_a_filler_row_is_not_counted() -> None:
    training, _ = rows()
    batch = training.batch([0, -1])
    _, count = model()(batch)
    assert count == 1 == training.valid_tokens([0, -1])


@pytest.mark.slow
def test_the_recipe_learns_the_digits(pools: Pools, tmp_path: Path) -> None:
    """On one process; on two, sharded, its first epoch is the same, and so all would be.

    It gets 357 or 358 of the 360 held out right, by seed; 350 are the 97% that it promises.
    """
    output, sharded = tmp_path / "run", tmp_path / "sharded"
    ended = shardlab("train", RECIPE, "--output", output)
    assert ended.code == 0, ended.err
    epoch = ["train.stop_after=24"]
    told = pools.run(2, "tests.train.jobs", "train_run", recipe=RECIPE, output=sharded, overrides=epoch)
    assert isinstance(told[0], dict), told
    assert json.loads((sharded / "plan.json").read_text())["backend"] == "fsdp"
    assert losses(sharded) == pytest.approx(losses(output)[:24], rel=1e-5)
    classifier = model()
    classifier.load_state_dict(load_file(output / "model" / "model.safetensors"))
    _, held_out = rows()
    batch = held_out.batch(range(len(held_out)))
    with torch.no_grad():
        right = (classifier.scores(batch["images"]).argmax(1) == batch["targets"]).float().mean()
    assert right >= 0.97
