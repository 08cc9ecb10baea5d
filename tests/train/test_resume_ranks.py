"""Runs on several ranks that stop and go on: bit for bit on the same backend, within 1e-6 on any other."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.checkpoint import AsyncSaver, find_newest, read_manifest, verify
from shardlab.errors import UserError
from shardlab.recipe import load_recipe
from shardlab.train.callbacks import Callback, StepResult
from shardlab.train.engine import Engine
from shardlab.train.run import train
from tests.distributed.pool import Pools
from tests.train.support import LIMIT_SECONDS, REPOSITORY, losses, shardlab, steps, write_recipe
from tests.train.test_resume import go, write

BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp")


def run(pools: Pools, world: int, recipe: Path, output: Path, backend: str, *overrides: str, resume: bool) -> None:
    """Train on `world` ranks, well."""
    told = pools.run(
        world,
        "tests.train.jobs",
        "train_run",
        recipe=recipe,
        output=output,
        overrides=[f"shard.backend={backend}", *overrides],
        world_size=world,
        resume="auto" if resume else None,
    )
    assert isinstance(told[0], dict), told


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_is_the_straight_one(pools: Pools, tmp_path: Path, backend: str, precision: str) -> None:
    """The rates in the middle of the warm-up, the moments, dropout, the samples: B14, B39.

    https://github.com/huggingface/accelerate/issues/1673: a DeepSpeed run began its warm-up again.
    """
    recipe = write(tmp_path / "in", train={"steps": 8, "schedule": {"name": "cosine", "warmup_steps": 4}})
    given = (f"train.precision={precision}",)
    run(pools, 2, recipe, tmp_path / "straight", backend, *given, resume=False)
    run(pools, 2, recipe, tmp_path / "run", backend, *given, "train.stop_after=3", resume=False)
    run(pools, 2, recipe, tmp_path / "run", backend, *given, resume=True)
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [row[key] for row in steps(tmp_path / "run")] == [row[key] for row in steps(tmp_path / "straight")], key
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_moves_from_machine_to_machine(pools: Pools, tmp_path: Path) -> None:
    """One run in six lives, each on another backend at another world size."""
    recipe = write(tmp_path / "in", shard={"micro_batch": 1})
    go(recipe, tmp_path / "straight")
    lives = [("zero3", 2), ("fsdp", 4), ("zero1", 1), ("ddp", 2), ("zero2", 4), ("fsdp", 1)]
    for number, (backend, world) in enumerate(lives, start=1):
        stop = (f"train.stop_after={2 * number}",) if number < len(lives) else ()
        run(pools, world, recipe, tmp_path / "run", backend, *stop, resume=number > 1)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-6)
    rates = [[row["lr"] for row in steps(tmp_path / name)] for name in ("run", "straight")]
    assert rates[0] == rates[1]
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "run"))
    weights, others = (torch.cat([state[name].flatten() for name in sorted(one)]) for state in (one, other))
    assert torch.linalg.vector_norm(weights - others) <= 1e-5 * torch.linalg.vector_norm(weights)


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 257,
    "max_position_embeddings": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_fused_experts_keep_their_runtime_names(pools: Pools, tmp_path: Path) -> None:
    """On disk transformers knows one tensor an expert, in the running model one for all: that is what is sharded."""
    with torch.random.fork_rng(devices=[]):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTRAL)).save_pretrained(tmp_path / "theirs")
    assert "model.layers.0.mlp.experts.gate_up_proj" not in load_file(tmp_path / "theirs" / "model.safetensors")
    train_section = {"steps": 8, "optimizer": {"lr": 1e-2}}
    recipe = write(tmp_path / "in", model={"config": None, "path": str(tmp_path / "theirs")}, train=train_section)
    go(recipe, tmp_path / "straight")
    for backend, world, stop in (("zero3", 2, 3), ("fsdp", 2, 5), ("ddp", 1, None)):
        stopping = (f"train.stop_after={stop}", "checkpoint.every=8") if stop else ("checkpoint.every=8",)
        run(pools, world, recipe, tmp_path / "run", backend, *stopping, resume=backend != "zero3")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-6)
    newest = find_newest(tmp_path / "run")
    shapes = {entry.name: entry.shape for entry in read_manifest(newest).tensors if entry.kind == "exp_avg"}
    experts = {name: shape for name, shape in shapes.items() if "experts" in name}
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{name}": shape
        for layer in (0, 1)
        for name, shape in (("gate_up_proj", (4, 48, 16)), ("down_proj", (4, 16, 24)))
    }
    ended = shardlab("checkpoint", "export", newest, tmp_path / "exported")
    assert ended.code == 0, ended.err
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values())
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert shardlab("checkpoint", "convert", tmp_path / "theirs", tmp_path / "ours").code == 0
    resume = ("--resume", tmp_path / "ours", "--reset-schedule")
    refused = shardlab("train", recipe, "--output", tmp_path / "other", *resume)
    assert refused.code == 2
    assert "lacks 6 tensors, among them model.layers.0.mlp.experts.down_proj: it is of another model" in refused.err


@pytest.mark.parametrize("backend", ["ddp", "zero3"])
def test_a_users_own_loop_goes_on(pools: Pools, tmp_path: Path, backend: str) -> None:
    """`save_state` and `load_state`; the loader passes over what was trained on."""
    train_section = {"global_batch_size": 4, "steps": 8}
    recipe = write_recipe(tmp_path, train=train_section, shard={"micro_batch": 2})
    job = {"recipe": recipe, "backend": backend}
    straight = pools.run(2, "tests.train.jobs", "own_loop_that_resumes", output=tmp_path / "a", stop=8, **job)[0]
    lives = [
        pools.run(2, "tests.train.jobs", "own_loop_that_resumes", output=tmp_path / "b", stop=stop, **job)[0]
        for stop in (3, 5, 8)
    ]
    assert [len(life) for life in lives] == [3, 2, 3]
    assert [loss for life in lives for loss in life] == straight


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_by_one_rank_alone_names_its_caller(pools: Pools, tmp_path: Path, backend: str, rank: int) -> None:
    """Within the time-out, and not into a collective of the training. Nothing is written."""
    recipe = write_recipe(tmp_path, train={"global_batch_size": 4, "steps": 8}, shard={"micro_batch": 2})
    arguments = {"recipe": recipe, "backend": backend, "rank": rank, "directory": tmp_path / "out"}
    told = pools.run(2, "tests.train.jobs", "save_alone", **arguments)
    assert told[1 - rank] == []
    assert len(told[rank]) == 2
    for message, what in zip(told[rank], ("save_state", "save"), strict=True):
        assert message.startswith(f"rank {rank} called {what} at ")
        assert f"{Path(__file__).parent / 'jobs.py'}:" in message
        assert "not all ranks did within 2 s; every rank has to call it" in message
    assert not (tmp_path / "out").exists()


class FillDisk(Callback):
    """Takes nearly all that is left of the disk after step 3, so that the next save finds it full.

    The one of step 2 may be under way: it has written its tensors by then, see `tensors_are_written`.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def on_step(self, engine: Engine, result: StepResult) -> None:
        if result.step == 3:
            left = shutil.disk_usage(self._directory).free
            (self._directory / "somebody-elses").write_bytes(b"0" * (left - 65536))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"a tmpfs can't be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.fixture
def tensors_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a save in the background returns; the rest is left to its thread and to the training's next looks."""
    save = AsyncSaver.save

    def save_and_wait(saver: AsyncSaver, *given: Any) -> Path | None:
        before = save(saver, *given)
        assert saver._job is not None
        wait([saver._job])
        return before

    monkeypatch.setattr(AsyncSaver, "save", save_and_wait)


@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.usefixtures("tensors_are_written")
def test_a_full_disk_never_passes_for_a_saved_run(
    tmp_path: Path, small_disk: Path, policy: str, asynchronous: str
) -> None:
    """It ends, or goes on to its end and then says so; what was saved before stays whole."""
    given = [f"checkpoint.on_failure={policy}", f"checkpoint.asynchronous={asynchronous}", "checkpoint.every=2"]
    recipe = load_recipe(write(tmp_path / "in"), [*given, "train.steps=8"])
    output = small_disk / "run"
    spare = small_disk / "spare"  # what the model's own directory needs at the end
    spare.write_bytes(b"0" * 200_000)

    class MakeRoom(Callback):
        def on_step(self, engine: Engine, result: StepResult) -> None:
            if result.step == 8:
                spare.unlink()

    with pytest.raises(UserError, match="disk full: the checkpoint") as caught:
        train(recipe, output, callbacks=[FillDisk(small_disk), MakeRoom()], say=lambda _: None)
    assert find_newest(output).name == "step-00000002"
    verify(output / "checkpoints" / "step-00000002")
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    last = steps(output)[-1]["step"]
    if policy == "stop":
        assert last in (4, 5, 6)
        assert not (output / "model").exists()
    else:
        assert last == 8
        assert (output / "model" / "model.safetensors").exists()
        assert "of the run's checkpoints were not saved (the model is)" in str(caught.value)


def test_a_disk_without_room_is_seen_before_the_weights_are_made(tmp_path: Path, small_disk: Path) -> None:
    recipe = write(tmp_path / "in", model={"config": None, "preset": "tiny"}, train={"optimizer": {"lr": 1e-3}})
    (small_disk / "others").write_bytes(b"0" * (6 << 20))
    ended = shardlab("train", recipe, "--output", small_disk / "run", "--set=checkpoint.every=2")
    assert "disk full: 3 checkpoints of" in ended.error
    assert "set checkpoint.every=null" in ended.error
    assert not (small_disk / "run").exists()


def number_of_lines(file: Path) -> int:
    """None yet where there is no file."""
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero3", "fsdp"])
def test_a_job_killed_while_it_saves_goes_on(tmp_path: Path, backend: str) -> None:
    """SIGKILL to all at some moment of a run that saves after every step: a checkpoint that verifies is there."""
    recipe = write(tmp_path / "in", train={"steps": 4000, "optimizer": {"lr": 1e-3}})
    command = [sys.executable, "-m", "shardlab", "train", str(recipe), "--output", str(tmp_path / "run"), "--nproc=2"]
    command += [f"--set=shard.backend={backend}", "--set=checkpoint.every=1", "--resume=auto"]
    with (
        (tmp_path / "err").open("w") as err,
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=err) as job,
    ):
        deadline = time.monotonic() + LIMIT_SECONDS
        while number_of_lines(tmp_path / "run" / "metrics.jsonl") < 6:
            assert job.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            time.sleep(0.02)
        time.sleep(0.37)
        ranks = psutil.Process(job.pid).children()
        for rank in [*ranks, job]:
            rank.send_signal(signal.SIGKILL)
    newest = find_newest(tmp_path / "run", say=lambda _: None)
    verify(newest)
    done = int(newest.name.removeprefix("step-"))
    assert done >= 4
    go(recipe, tmp_path / "run", "--resume=auto", f"--set=train.stop_after={done + 2}")
    assert [row["step"] for row in steps(tmp_path / "run")] == list(range(1, done + 3))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"]["step"] == done
