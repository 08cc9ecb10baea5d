"""Runs that stop and go on: the run of one that never stopped, to the last bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shardlab.checkpoint import CheckpointReader, verify
from shardlab.data import prepare_data
from shardlab.recipe import load_recipe
from tests.train.builders import MARK_VARIABLE
from tests.train.support import (
    JOB_VARIABLE,
    LIMIT_SECONDS,
    REPOSITORY,
    Ended,
    end_job,
    losses,
    metrics,
    shardlab,
    steps,
    write_recipe,
    write_text,
)

# Dropout shows whether random numbers go on where they were; two tensors of one shape have rates of their own.
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 257}
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
TRAIN = {
    "steps": 12,
    "schedule": {"name": "cosine", "warmup_steps": 4},
    "optimizer": {"lr": 1e-2, "groups": [{"pattern": "*.h.1.mlp.c_fc.weight", "lr": 3e-3}]},
}
ROWS = 24  # with four in a step the first epoch ends after step 6


def write(directory: Path, **sections: dict[str, Any]) -> Path:
    """The recipe of all runs here: 24 rows, 12 steps of 4."""
    directory.mkdir(exist_ok=True)
    (directory / "gpt2.json").write_text(json.dumps(MODEL | DROPOUT))
    text = write_text(directory / "rows.txt")
    text.write_text(text.read_text()[: ROWS * 32])
    given = {
        "model": {"config": str(directory / "gpt2.json")},
        "data": {"evaluation_fraction": 0.0, "files": [str(text)]},
        "train": TRAIN,
        "shard": {"micro_batch": 2},
    }
    return write_recipe(directory, **{name: {**given.get(name, {}), **sections.get(name, {})} for name in given})


def go(recipe: Path, output: Path, *arguments: str) -> None:
    """Train, well."""
    ended = shardlab("train", recipe, "--output", output, *arguments)
    assert ended.code == 0, ended.err


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, directory) of the run that does not stop."""
    directory = tmp_path_factory.mktemp("straight")
    recipe = write(directory)
    data = prepare_data(load_recipe(recipe).data).train
    assert len(data) == ROWS, "the epoch's boundary lies between two steps"
    go(recipe, directory / "run")
    return recipe, directory / "run"


def same_run(one: Path, other: Path) -> None:
    """Losses, norms, rates and the model that was saved: bit for bit."""
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in steps(one)] == [row[key] for row in steps(other)], key
    first, second = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("stops", [(5,), (6,), (3, 7)], ids=["mid-epoch", "epoch boundary", "twice"])
def test_a_run_that_stops_is_the_run_that_does_not(
    straight: tuple[Path, Path], tmp_path: Path, stops: tuple[int, ...]
) -> None:
    """https://github.com/huggingface/transformers/pull/46628: other samples, other dropout, after a resume."""
    recipe, run = straight
    for stop in stops:
        go(recipe, tmp_path / "run", f"--set=train.stop_after={stop}", "--resume=auto")
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["steps"], summary["stopped"]) == (stop, f"train.stop_after {stop}")
        assert not (tmp_path / "run" / "model").exists()
    go(recipe, tmp_path / "run", "--resume=auto")
    same_run(run, tmp_path / "run")
    resumed = json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"]
    assert resumed["step"] == stops[-1]


def test_from_another_runs_checkpoint(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """DIR is a run or one checkpoint; the first run stays as it is, and the new one says where it came from."""
    recipe, run = straight
    go(recipe, tmp_path / "first", "--set=train.stop_after=5")
    before = sorted(file.name for file in (tmp_path / "first").rglob("*"))
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000005"
    for number, given in enumerate((tmp_path / "first", checkpoint)):
        output = tmp_path / f"other-{number}"
        go(recipe, output, f"--resume={given}", "--set=checkpoint.every=12")
        assert [row["step"] for row in steps(output)] == [6, 7, 8, 9, 10, 11, 12]
        assert losses(output) == losses(run)[5:]
        with CheckpointReader(output / "checkpoints" / "step-00000012") as reader:
            assert reader.manifest.parent == str(checkpoint)
    assert sorted(file.name for file in (tmp_path / "first").rglob("*")) == before


def test_a_streamed_text_goes_on_where_it_was(tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/7538: a stream started over after the second resume."""
    recipe = write(tmp_path / "in", data={"streaming": True})
    go(recipe, tmp_path / "straight")
    for stop in (3, 7):
        go(recipe, tmp_path / "run", f"--set=train.stop_after={stop}", "--resume=auto")
    go(recipe, tmp_path / "run", "--resume=auto")
    same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_kept(straight: tuple[Path, Path], tmp_path: Path, asynchronous: bool) -> None:
    """The two newest, and the best by evaluation; each verifies, and holds what a resume needs."""
    recipe, _ = straight
    options = ["checkpoint.every=2", "train.evaluate_every=2", "data.evaluation_fraction=0.2", "train.steps=8"]
    options += [f"checkpoint.asynchronous={str(asynchronous).lower()}", "train.optimizer.lr=0.2"]
    go(recipe, tmp_path / "run", *(f"--set={option}" for option in options))
    evaluations = {row["step"]: row["evaluation_loss"] for row in metrics(tmp_path / "run") if "evaluation_loss" in row}
    best = min(evaluations, key=evaluations.__getitem__)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in sorted({6, 8, best})]
    for name in names:
        verify(tmp_path / "run" / "checkpoints" / name)
    with CheckpointReader(tmp_path / "run" / "checkpoints" / names[-1]) as reader:
        manifest = reader.manifest
    assert manifest.step == 8
    assert manifest.evaluation == evaluations[8]
    assert manifest.cursor["samples"] == 32
    assert (manifest.schedule["applied"], manifest.schedule["name"]) == (8, "cosine")
    assert manifest.recipe["train"]["steps"] == 8
    assert manifest.plan["backend"] == "ddp"
    assert manifest.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert {"torch", "deepspeed", "shardlab"} <= set(manifest.versions)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(straight: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, run = straight
    go(recipe, tmp_path / "run", "--set=checkpoint.every=3", "--set=train.stop_after=8")
    newest = tmp_path / "run" / "checkpoints" / "step-00000008"
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--resume=auto")
    assert ended.code == 0, ended.err
    assert f"checkpoint {newest} is damaged and not used: " in ended.out
    assert "step-00000006: step 6, saved by ddp" in ended.out
    same_run(run, tmp_path / "run")


def test_rows_of_steps_that_are_done_again_are_not_told_twice(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """A run that was killed in the middle of writing a row, two steps after its checkpoint."""
    recipe, run = straight
    go(recipe, tmp_path / "run", "--set=train.stop_after=5")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    go(recipe, tmp_path / "run", "--resume=auto")
    same_run(run, tmp_path / "run")


def test_resuming_before_the_first_checkpoint_starts_the_run(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """As `--max-restarts` does."""
    recipe, run = straight
    (tmp_path / "run").mkdir()
    shutil.copy(run / "recipe.yaml", tmp_path / "run")
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--resume=auto")
    assert ended.code == 0, ended.err
    assert "holds no checkpoint yet" in ended.out
    same_run(run, tmp_path / "run")


@pytest.fixture(scope="module")
def stopped(straight: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after step 5."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    go(straight[0], directory, "--set=train.stop_after=5")
    return directory


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set=train.steps=24"], "train.steps is 24, but 12 in"),
        (["--set=train.optimizer.lr=0.5"], "train.optimizer.lr is 0.5, but 0.01 in"),
        (["--set=train.schedule.warmup_steps=0"], "train.schedule.warmup_steps is 0, but 4 in"),
        (["--set=train.global_batch_size=8"], "train.global_batch_size is not what"),
        (["--set=train.seed=1"], "train.seed is not what"),
        (["--set=data.sequence_length=16"], "the number of rows that the data makes is not what"),
        (["--set=data.evaluation_fraction=0.1"], "is not what"),
        (["--set=train.optimizer={name: sgd, lr: 0.01, momentum: 0.9}"], "keeps exp_avg, exp_avg_sq"),
        (["--set=model={preset: tiny}", "--set=train.optimizer.groups=[]"], "it is of another model"),
    ],
)
def test_another_run_is_refused(
    straight: tuple[Path, Path], stopped: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3875: warm-up started again, and nobody was told."""
    ended = shardlab("train", straight[0], "--output", tmp_path / "new", f"--resume={stopped}", *arguments)
    assert says in ended.error


def test_a_longer_schedule_when_asked_for(straight: tuple[Path, Path], stopped: Path, tmp_path: Path) -> None:
    """The rates are those of 24 steps, from step 6 on."""
    arguments = [f"--resume={stopped}", "--set=train.steps=24", "--reset-schedule"]
    go(straight[0], tmp_path / "longer", *arguments)
    go(straight[0], tmp_path / "whole", "--set=train.steps=24")
    rates = [row["lr"] for row in steps(tmp_path / "whole")]
    assert [row["lr"] for row in steps(tmp_path / "longer")] == rates[5:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resume=nowhere"], "nowhere holds no checkpoint"),
        (["--resume=auto"], "--resume auto needs --output"),
        (["--reset-schedule"], "--reset-schedule is for a run that goes on"),
    ],
)
def test_a_resume_that_means_nothing(straight: tuple[Path, Path], arguments: list[str], says: str) -> None:
    assert says in shardlab("train", straight[0], *arguments).error


def test_a_finished_run_is_left_alone(straight: tuple[Path, Path]) -> None:
    recipe, run = straight
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    assert "holds a finished run" in shardlab("train", recipe, "--output", run, "--resume=auto").error
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


@pytest.fixture(scope="module")
def held_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, directory) of a run whose model stays in a step where a test asks for it; here nothing does."""
    directory = tmp_path_factory.mktemp("held")
    train = TRAIN | {"optimizer": {"lr": 1e-2}}
    recipe = write(directory, model={"config": None, "builder": "tests.train.builders:held_scores"}, train=train)
    go(recipe, directory / "run")
    return recipe, directory / "run"


def command(recipe: Path, output: Path, *arguments: str) -> list[str]:
    """`shardlab train`, for a process of its own."""
    return [sys.executable, "-m", "shardlab", "train", str(recipe), "--output", str(output), *arguments]


class Held:
    """`shardlab train` in processes of its own, until its last rank stays in a step, of which it has done two."""

    def __init__(self, recipe: Path, directory: Path, *arguments: str):
        mark = directory / "mark"
        self._err = directory / "err"
        self._out = directory / "out"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.launcher = subprocess.Popen(
                command(recipe, directory / "run", *arguments),
                cwd=REPOSITORY,
                stdout=out,
                stderr=err,
                env={**os.environ, MARK_VARIABLE: str(mark), JOB_VARIABLE: str(mark)},
            )
        self._job = str(mark)
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not mark.exists():
                assert self.launcher.poll() is None, self._err.read_text()
                assert time.monotonic() < deadline, self._err.read_text()
                time.sleep(0.02)
        except BaseException:
            end_job(self._job)
            raise
        self.rank = psutil.Process(int(mark.read_text()))

    def finish(self) -> Ended:
        """What it left."""
        try:
            self.launcher.wait(LIMIT_SECONDS)
        finally:
            end_job(self._job)
        return Ended(self.launcher.returncode, self._out.read_text(), self._err.read_text())


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "nproc"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_and_stops(
    held_run: tuple[Path, Path], tmp_path: Path, number: signal.Signals, nproc: int
) -> None:
    """To one process, or to the launcher of two ranks; then the run goes on, on one, as if nothing had been."""
    recipe, run = held_run
    job = Held(recipe, tmp_path, f"--nproc={nproc}")
    job.launcher.send_signal(number)
    ended = job.finish()
    assert ended.code == 75, ended.err
    assert f"(on {number.name}); checkpoint: " in ended.out
    assert "Traceback" not in ended.err
    done = {1: 3, 2: 5}[nproc]  # the step under way: with the fifth micro-batch of the rank
    assert steps(tmp_path / "run")[-1]["step"] == done
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    go(recipe, tmp_path / "run", "--resume=auto")
    assert losses(tmp_path / "run") == pytest.approx(losses(run), rel=1e-6)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(held_run: tuple[Path, Path], tmp_path: Path) -> None:
    """The host of one rank is about to be taken away."""
    job = Held(held_run[0], tmp_path, "--nproc=2")
    job.rank.send_signal(signal.SIGUSR1)
    ended = job.finish()
    assert ended.code == 75, ended.err
    assert ended.err.count("Traceback") == 0
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_a_killed_rank_starts_again_from_the_newest_checkpoint(held_run: tuple[Path, Path], tmp_path: Path) -> None:
    """The launcher's restarts are tested where it is; here, that they resume."""
    recipe, run = held_run
    saving = ("--set=checkpoint.every=2", "--set=checkpoint.asynchronous=false")
    job = Held(recipe, tmp_path, "--nproc=2", "--max-restarts=1", *saving)
    job.rank.kill()
    ended = job.finish()
    assert ended.code == 0, ended.err
    assert ended.err.count("killed by signal 9") == 1
    assert ended.out.count("resumed from ") == 1
    assert losses(tmp_path / "run") == pytest.approx(losses(run), rel=1e-6)
