"""Runs that go on from what went through another tool's files, or from a model directory. Field case B38."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.train.support import losses, shardlab, steps
from tests.train.test_resume import go, write

pytestmark = pytest.mark.slow

STEPS, STOP = 8, 3
TRAIN = {
    "steps": STEPS,
    "schedule": {"name": "cosine", "warmup_steps": 4},
    "optimizer": {"lr": 1e-2, "groups": [{"pattern": "*.h.1.mlp.c_fc.weight", "lr": 3e-3}]},
}


def command(*arguments: object) -> None:
    ended = shardlab("checkpoint", *arguments)
    assert ended.code == 0, ended.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(recipe, the run that does not stop, the one that did)."""
    directory = tmp_path_factory.mktemp("runs")
    recipe = write(directory, train=TRAIN)
    go(recipe, directory / "straight")
    go(recipe, directory / "stopped", "--set", f"train.stop_after={STOP}")
    return recipe, directory / "straight", directory / "stopped"


@pytest.mark.parametrize("through", [("dcp",), ("zero3", "--world-size", "3"), ("dcp", "zero3", "--world-size", "2")])
def test_a_run_goes_on_after_a_detour(runs: tuple[Path, Path, Path], tmp_path: Path, through: tuple[str, ...]) -> None:
    """Bit for bit: the losses, rates and gradient norms of the run that never stopped."""
    recipe, straight, at = runs
    tools = [(tool, through[-2:] if tool == "zero3" else ()) for tool in through if tool in ("dcp", "zero3")]
    for tool, arguments in tools:
        command("convert", at, tmp_path / f"as-{tool}", "--to", tool, *arguments)
        at = tmp_path / f"from-{tool}"
        command("convert", tmp_path / f"as-{tool}", at)
    refused = shardlab("train", recipe, "--output", tmp_path / "run", "--resume", at)
    assert refused.code == 2
    assert "--reset-schedule" in refused.err
    go(recipe, tmp_path / "run", "--resume", str(at), "--reset-schedule")
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [row[key] for row in steps(tmp_path / "run")] == [row[key] for row in steps(straight)[STOP:]], key


def test_a_model_directory_is_a_start(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Its weights and no moments: the losses are those of the run which starts from the model itself."""
    recipe, straight, _ = runs
    command("convert", straight / "model", tmp_path / "ours")
    go(recipe, tmp_path / "run", "--resume", str(tmp_path / "ours"), "--reset-schedule")
    model = ("--set", "model.config=null", "--set", f"model.path={straight / 'model'}")
    go(recipe, tmp_path / "expected", *model)
    assert losses(tmp_path / "run") == losses(tmp_path / "expected")


def test_an_untied_checkpoint_is_of_another_model(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """What a tied model would drop in silence is compared first."""
    recipe, straight, _ = runs
    shutil.copytree(straight / "model", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, tmp_path / "model" / "model.safetensors"
    )
    command("convert", tmp_path / "model", tmp_path / "ours")
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--resume", tmp_path / "ours", "--reset-schedule")
    assert ended.code == 2
    assert "the checkpoint has what the model lacks: 1 tensors, among them lm_head.weight" in ended.err
