"""A tiny recipe over a text of its own, and the command, run in this process or in its own."""

import io
import json
import os
import random
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import yaml

from shardlab.cli import main
from shardlab.topology import Topology

REPOSITORY = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "shardlab")
JOB_VARIABLE = "SHARDLAB_TEST_JOB"
LIMIT_SECONDS = 480  # for a command that takes ten on a quiet machine
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")

# The fixtures TINY and TINY-T of the field cases.
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

_BASE: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny"},
    "data": {"tokenizer": "bytes", "sequence_length": 32, "evaluation_fraction": 0.1},
    "train": {
        "steps": 3,
        "global_batch_size": 4,
        "precision": "fp32",
        "schedule": {"name": "linear", "warmup_steps": 0},
    },
    "shard": {},
    "checkpoint": {},
}


def write_text(file: Path, words: int = 800) -> Path:
    """The same words at every call."""
    draw = random.Random(0)
    file.write_text(" ".join(draw.choice(WORDS) for _ in range(words)), encoding="utf-8")
    return file


def write_recipe(directory: Path, **sections: Mapping[str, Any]) -> Path:
    """A recipe of a second's work in `directory`, changed by `sections`; a model given replaces the preset."""
    text = write_text(directory / "text.txt")
    tree = {name: {**keys, **sections.get(name, {})} for name, keys in _BASE.items()}
    tree["model"] = dict(sections.get("model", _BASE["model"]))
    tree["data"] = {"files": [str(text)], "cache_dir": str(directory / "cache"), **tree["data"]}
    file = directory / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


@dataclass(frozen=True)
class Ended:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its one `error:` line, which must be all that it says of the failure, and the last line."""
        assert self.code == 2, self.err
        lines = self.err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], self.err
        assert "Traceback" not in self.err
        return lines[-1].removeprefix("error: ")


def shardlab(*arguments: str | Path) -> Ended:
    """The command in this process: the libraries are imported already."""
    out, err = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", ["shardlab", *map(str, arguments)]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main()
    except SystemExit as exit_:
        code = exit_.code
    finally:
        torch.set_num_threads(threads)
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())


def run_process(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Ended:
    """A command in a process of its own, from the repository's root, so that `tests` can be imported."""
    name = uuid.uuid4().hex
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {}), JOB_VARIABLE: name},
    )
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        end_job(name)
        out, err = process.communicate()
        raise AssertionError(f"{command[0]} hangs; it said:\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def free_port() -> str:
    """For the launcher that can't look for one itself; below those that the kernel gives to others meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def job_processes(name: str) -> list[psutil.Process]:
    """Those whose environment says that they are of this job, whatever session they are in; a zombie has none."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(JOB_VARIABLE) == name:
                found.append(process)
    return found


def end_job(name: str) -> None:
    """End what is left of it."""
    for process in job_processes(name):
        with suppress(psutil.Error):
            process.kill()


def metrics(directory: Path) -> list[dict[str, Any]]:
    """All rows of a run's metrics; NaN and infinity are no numbers in JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def steps(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's steps, without those of its evaluations."""
    return [row for row in metrics(directory) if "loss" in row]


def losses(directory: Path) -> list[float]:
    """The loss of each step."""
    return [row["loss"] for row in steps(directory)]


def one_rank() -> Topology:
    """This process alone, without asking Accelerate."""
    return Topology(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node=0,
        nodes=1,
        device="cpu",
        host_memory_bytes=1 << 30,
        device_memory_bytes=None,
        launcher="none",
    )
