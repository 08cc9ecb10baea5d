"""Any module: the digits classifier, its rows and their augmentation."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes.digits import model, rows
from shardlab.data import WindowLoader

ROOT = Path(__file__).parent.parent.parent


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
def test_the_recipe_reaches_97_percent_on_held_out_digits(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "shardlab",
        "train",
        "recipes/digits.yaml",
        "--nproc",
        "2",
        "--output",
        str(output),
    ]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=500)
    assert json.loads((output / "plan.json").read_text())["backend"] == "fsdp"
    classifier = model()
    classifier.load_state_dict(load_file(output / "model" / "model.safetensors"))
    _, held_out = rows()
    batch = held_out.batch(range(len(held_out)))
    with torch.no_grad():
        right = (classifier.scores(batch["images"]).argmax(1) == batch["targets"]).float().mean()
    assert right >= 0.97
