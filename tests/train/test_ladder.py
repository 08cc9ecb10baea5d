"""`shardlab train` with blocks that are run again as the memory needs it, and with activations on the disk."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train.support import LIMIT_SECONDS, REPOSITORY, TINY, losses, shardlab, write_recipe

# Wide rows beside a small model, so that what the blocks save is most of a step: about 100 MiB.
LONG = {**TINY, "num_hidden_layers": 6, "max_position_embeddings": 512, "intermediate_size": 256}


def write(directory: Path, steps: int = 2) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LONG | {"vocab_size": 300}))
    return write_recipe(
        directory,
        model={"config": str(directory / "config.json")},
        data={"sequence_length": 256},
        train={"steps": steps, "global_batch_size": 8},
        shard={"backend": "ddp", "micro_batch": 8},
    )


def go(recipe: Path, output: Path, *arguments: str) -> str:
    ended = shardlab("train", recipe, "--output", output, *arguments)
    assert ended.code == 0, ended.err
    return ended.out + ended.err


def test_the_run_is_the_same_and_so_is_its_model(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    go(recipe, tmp_path / "plain")
    plan = json.loads((tmp_path / "plain" / "plan.json").read_text())
    assert plan["recompute"] == "none"
    summary = json.loads((tmp_path / "plain" / "summary.json").read_text())
    predicted = summary["predicted_memory_bytes"]
    least = json.loads(_planned(recipe, "--set=shard.recompute=full"))["recipe"]["footprint"]
    middle = (least["high"] + predicted["high"]) // 2 + predicted["libraries"]
    go(recipe, tmp_path / "auto", "--set=shard.recompute=auto", f"--set=shard.memory_limit={middle // 1024}KiB")
    found = json.loads((tmp_path / "auto" / "plan.json").read_text())
    assert found["recompute"] == "full"
    assert 0 < found["recompute_blocks"] < 6
    said = go(recipe, tmp_path / "disk", "--set=shard.offload.activations=disk")
    assert "offload activations (disk)" in said
    for run in ("auto", "disk"):
        assert losses(tmp_path / run) == losses(tmp_path / "plain")
        model = (tmp_path / run / "model" / "model.safetensors").read_bytes()
        assert model == (tmp_path / "plain" / "model" / "model.safetensors").read_bytes()
    assert not [file.name for file in (tmp_path / "disk").iterdir() if file.name.startswith("activations")]


def _planned(recipe: Path, *arguments: str) -> str:
    ended = shardlab("plan", recipe, "--json", *arguments)
    assert ended.code == 0, ended.err
    return ended.out


def test_what_can_not_be_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    for given, message in (
        ("offload.activations=cpu", "shard.offload.activations cpu moves nothing where a CPU computes"),
        ("offload.disk_limit=1GiB", "disk_limit is for activations: disk, not none"),
        ("memory_limit=1GiB", "memory_limit is for backend stream or recompute auto, not ddp and none"),
    ):
        ended = shardlab("train", recipe, "--output", tmp_path / "no", f"--set=shard.{given}")
        assert ended.code == 2
        assert message in ended.error
    limited = ("--set=shard.recompute=auto", "--set=shard.memory_limit=100MiB")
    ended = shardlab("train", recipe, "--output", tmp_path / "no", *limited)
    assert "recompute auto: with every block run again this plan still needs" in ended.error


def test_a_kill_leaves_no_file(tmp_path: Path) -> None:
    recipe = write(tmp_path, steps=10_000)
    given = ["--set=shard.offload.activations=disk", f"--set=shard.offload.directory={tmp_path / 'away'}"]
    command = [sys.executable, "-m", "shardlab", "train", str(recipe), "--output", str(tmp_path / "run"), *given]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as job:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not _open_and_unnamed(job.pid, tmp_path / "away"):
            assert job.poll() is None, job.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGKILL)
        job.communicate()
    assert list((tmp_path / "away").iterdir()) == []


def _open_and_unnamed(process: int, directory: Path) -> bool:
    """Whether it has a file open that was in `directory`, which the system shows as deleted."""
    try:
        links = [link.readlink() for link in Path(f"/proc/{process}/fd").iterdir()]
    except (OSError, psutil.Error):
        return False
    return any(str(link).startswith(str(directory)) and str(link).endswith("(deleted)") for link in links)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--set=shard.offload.activations=disk",)], ids=["", "to the disk"])
def test_the_peak_is_within_its_interval(more: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own: this one has memory that others left."""
    command = [
        sys.executable,
        "-m",
        "shardlab",
        "train",
        str(write(tmp_path, steps=3)),
        "--output",
        str(tmp_path / "run"),
    ]
    ended = subprocess.run([*command, *more], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    predicted = summary["predicted_memory_bytes"]
    measured = max(
        high - low for high, low in zip(summary["peak_memory_bytes"], summary["base_memory_bytes"], strict=True)
    )
    assert predicted["low"] <= measured <= predicted["high"]
