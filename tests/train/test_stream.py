"""`shardlab train` with backend stream: the run of ddp, within a memory limit, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardlab.backends.stream import store
from shardlab.errors import ExitCode
from tests.train.support import JOB_VARIABLE, LIMIT_SECONDS, REPOSITORY, losses, metrics, shardlab, write_recipe

LIMIT = "1GiB"
SMALL = {"masters": "bf16", "moments": "8bit", "gradients": "bf16"}
STREAM = ("--set=shard.backend=stream", f"--set=shard.memory_limit={LIMIT}")


def write(directory: Path, **train: Any) -> Path:
    """Six steps of two micro-batches, with an evaluation in the middle."""
    directory.mkdir(exist_ok=True)
    given = {"steps": 6, "evaluate_every": 3, **train}
    return write_recipe(directory, train=given, shard={"micro_batch": 2}, checkpoint={"every": 2})


def go(recipe: Path, output: Path, *arguments: str) -> str:
    """Train, well; what it said."""
    ended = shardlab("train", recipe, "--output", output, *arguments)
    assert ended.code == 0, ended.err
    return ended.out + ended.err


def model(run: Path) -> dict[str, torch.Tensor]:
    """All weights of the model that was saved, from however many files."""
    return {name: value for file in (run / "model").glob("*.safetensors") for name, value in load_file(file).items()}


def same_model(one: Path, other: Path) -> None:
    first, second = model(one), model(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, directory) of the run of ddp."""
    directory = tmp_path_factory.mktemp("memory")
    recipe = write(directory)
    go(recipe, directory / "run", "--set=shard.backend=ddp")
    return recipe, directory / "run"


def test_the_run_is_that_of_ddp(in_memory: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, reference = in_memory
    said = go(recipe, tmp_path / "run", *STREAM)
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=1e-5)
    mine, theirs = ([row.get("evaluation_loss") for row in metrics(run)] for run in (tmp_path / "run", reference))
    assert [one for one in mine if one] == pytest.approx([one for one in theirs if one], rel=1e-5)
    same_model(tmp_path / "run", reference)
    assert not (tmp_path / "run" / "stream").exists(), "the files go with the run"
    assert "training state in files in the run directory, within 1 GiB" in said
    predicted = json.loads((tmp_path / "run" / "summary.json").read_text())["predicted_memory_bytes"]
    assert predicted["high"] > 0
    (tmp_path / "held.txt").write_text("alpha beta gamma " * 20)
    ended = shardlab("eval", tmp_path / "run" / "model", "--files", tmp_path / "held.txt", "--sequence-length", "32")
    assert ended.code == 0, ended.err


def test_a_run_that_stops_goes_on_from_its_checkpoint(in_memory: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, reference = in_memory
    go(recipe, tmp_path / "run", *STREAM, "--set=train.stop_after=3")
    assert not (tmp_path / "run" / "stream").exists()
    go(recipe, tmp_path / "run", *STREAM, "--resume=auto")
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=1e-5)
    same_model(tmp_path / "run", reference)


def test_a_run_with_small_state_goes_on_from_its_checkpoint_and_in_memory(tmp_path: Path) -> None:
    """Its checkpoints are fp32, so `ddp` takes them up."""
    recipe = write(tmp_path, optimizer={"lr": 1e-3})
    small = [f"--set=train.optimizer.{key}={value}" for key, value in SMALL.items()]
    go(recipe, tmp_path / "straight", *STREAM, *small)
    go(recipe, tmp_path / "run", *STREAM, *small, "--set=train.stop_after=4")
    go(recipe, tmp_path / "run", "--set=shard.backend=ddp", "--resume=auto")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=5e-3)
    ended = shardlab("train", recipe, "--output", tmp_path / "no", "--set=shard.backend=ddp", *small)
    assert "train.optimizer.masters bf16 is for backend stream, not ddp" in ended.error


@pytest.mark.parametrize(("first", "second"), [("ddp", "stream"), ("stream", "ddp")])
def test_a_run_may_change_between_memory_and_disk(
    in_memory: tuple[Path, Path], tmp_path: Path, first: str, second: str
) -> None:
    recipe, reference = in_memory
    go(recipe, tmp_path / "run", f"--set=shard.backend={first}", "--set=train.stop_after=4")
    go(recipe, tmp_path / "run", f"--set=shard.backend={second}", "--resume=auto")
    same_model(tmp_path / "run", reference)


def signalled(arguments: list[str], number: int, seconds: float) -> int:
    """The code of a run that got a signal while its fifth window was held for `seconds`: after two checkpoints."""
    held = (
        "import sys, time; from shardlab.backends.stream import engine; from shardlab.cli import main\n"
        "run = engine.StreamBackend.run_window\n"
        "def window(self, w, lr):\n"
        f"    if w.step == 4: print('held', flush=True); time.sleep({seconds})\n"
        "    return run(self, w, lr)\n"
        "engine.StreamBackend.run_window = window\n"
        "main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", held, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, JOB_VARIABLE: "signalled"},
    )
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.stdout.readline().strip() != "held":
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.send_signal(number)
        process.stdout.read()
        return process.wait(LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_sigterm_leaves_a_checkpoint_and_no_state(in_memory: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, reference = in_memory
    run = tmp_path / "run"
    arguments = ["train", str(recipe), "--output", str(run), *STREAM]
    assert signalled(arguments, signal.SIGTERM, seconds=2) == ExitCode.STOPPED
    assert not (run / "stream").exists()
    assert (run / "checkpoints" / "step-00000005").exists()
    go(recipe, run, *STREAM, "--resume=auto")
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)


def test_a_run_that_was_killed_goes_on_and_removes_what_is_left(in_memory: tuple[Path, Path], tmp_path: Path) -> None:
    """The state's files lie where the recipe says, in a directory of the run's own."""
    recipe, reference = in_memory
    disk = tmp_path / "disk"
    where = f"--set=shard.stream_directory={disk}"
    run = tmp_path / "run"
    arguments = ["train", str(recipe), "--output", str(run), *STREAM, where, "--set=train.steps=6"]
    assert signalled(arguments, signal.SIGKILL, seconds=1000) == -signal.SIGKILL
    (left,) = disk.iterdir()
    assert left.name.startswith("run-")
    assert (left / store.RECORD).exists()
    said = go(recipe, run, *STREAM, where, "--resume=auto")
    assert f"{left} held " in said
    assert "MiB of a run that was killed: removed" in said
    assert "step 4" in said
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    same_model(run, reference)
    assert not left.exists()


def test_a_limit_that_nothing_fits_is_refused_with_need_and_have(tmp_path: Path) -> None:
    ended = shardlab("train", write(tmp_path), "--output", tmp_path / "run", "--set=shard.backend=stream",
                     "--set=shard.memory_limit=300MiB")  # fmt: skip
    assert "backend stream needs 0.4" in ended.error
    assert "has 0.293 (shard.memory_limit)" in ended.error
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_too_small_is_refused_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    ended = shardlab("train", write(tmp_path), "--output", tmp_path / "run", *STREAM)
    assert "disk full: " in ended.error  # of the model and the checkpoints; the state's own files are looked at later
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--set=shard.memory_limit=300",), "expected a size such as 512MiB or 2GiB, got 300"),
        (("--set=shard.memory_limit=2XB",), "expected a size such as 512MiB or 2GiB, got 2XB"),
        (("--set=shard.backend=ddp",), "memory_limit is for backend stream or recompute auto, not ddp and none"),
        (("--set=shard.offload.optimizer=cpu",), "not stream"),
        (("--set=shard.replicas=2",), "shard.replicas 2 is for backend fsdp, not stream"),
        (("--nproc=2",), "shard.backend stream is for one rank, and this job has 2"),
        (("--set=shard.memory_limit=900TiB",), "lower it"),
    ],
)
def test_what_stream_cannot_do_is_refused(tmp_path: Path, setting: tuple[str, ...], message: str) -> None:
    ended = shardlab("train", write(tmp_path), "--output", tmp_path / "run", *STREAM, *setting)
    assert message in ended.error


def test_a_model_without_segments_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model={"builder": "tests.train.builders:scores"}, data={"packing": False})
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set=shard.backend=stream")
    assert "shard.backend stream needs a causal language model with a list of blocks" in ended.error


def test_plan_and_dry_run_show_it(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    ended = shardlab("plan", recipe, "--nproc", "1")
    assert "stream: " in ended.out
    assert "GiB on the disk; a step of 4 sequences reads" in ended.out
    assert "stream" not in shardlab("plan", recipe, "--nproc", "2").out
    ended = shardlab("plan", recipe, *STREAM, "--json")
    found = json.loads(ended.out)
    assert found["recipe"]["footprint"]["disk"]["read"] > 0
    assert "within 1 GiB" in shardlab("train", recipe, *STREAM, "--dry-run").out
    ended = shardlab("plan", recipe, *STREAM, "--emit", tmp_path / "out")
    assert "backend stream is shardlab's own" in ended.error
    assert not (tmp_path / "out").exists()
