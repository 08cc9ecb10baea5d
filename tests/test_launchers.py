"""One job under every launcher, and how it ends when something goes wrong. Real processes, so slow."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from tests.train.builders import MARK_VARIABLE
from tests.train.support import (
    COMMAND,
    JOB_VARIABLE,
    LIMIT_SECONDS,
    REPOSITORY,
    Ended,
    end_job,
    free_port,
    job_processes,
    losses,
    run_process,
    shardlab,
    write_recipe,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")]

BIN = Path(sys.executable).parent
ALL_GONE_SECONDS = 60  # from a failure to the last process: five as a rule, and no time-out of torch's is as short
MODULE = ("-m", "shardlab")
TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2")  # standalone: on a free port

LAUNCHERS: dict[str, tuple[str | Path, ...]] = {
    "torchrun": (*TORCHRUN, *MODULE),
    "accelerate": (
        BIN / "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
        *MODULE,
    ),
    "deepspeed": (BIN / "deepspeed", "--num_gpus", "2", "--master_port", "PORT", "--module", "shardlab"),
}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Where a launcher finds the repository: unlike `python -m`, not all look into the working directory."""
    return {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}


def by_shardlab(arguments: Sequence[str | Path]) -> list[str | Path]:
    return [*COMMAND, *arguments, "--nproc", "2"]


COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cpp|nvcc|icc|icpc)(-[\d.]+)?")


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """A PATH with all that this machine's has but compilers, and no word of CUDA."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for tool in Path(directory).glob("*"):
            link = tools / tool.name
            if not COMPILERS.fullmatch(tool.name) and not link.is_symlink():
                link.symlink_to(tool)
    assert shutil.which("c++", path=str(tools)) is None
    return {"PATH": str(tools), "CUDA_HOME": "", "CXX": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    directory = tmp_path_factory.mktemp("alone")
    ended = shardlab("train", write_recipe(directory, shard={"micro_batch": 1}), "--output", directory / "run")
    assert ended.code == 0, ended.err
    return losses(directory / "run")


def run_two_ranks(
    directory: Path, launcher: str, environment: dict[str, str], alone: list[float], **shard: str
) -> None:
    recipe = write_recipe(directory, shard={"micro_batch": 1, **shard})
    together = directory / "together"
    arguments: list[str | Path] = ["train", recipe, "--output", together]
    command = by_shardlab(arguments) if launcher == "shardlab" else [*LAUNCHERS[launcher], *arguments]
    ended = run_process([free_port() if part == "PORT" else part for part in command], environment)
    assert ended.code == 0, ended.err
    assert losses(together) == pytest.approx(alone, rel=1e-5)
    assert json.loads((together / "plan.json").read_text())["world_size"] == 2
    assert ended.out.count("2 ranks = 4 sequences") == 1, "told once"


@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_every_launcher_gives_the_losses_of_one_process(
    tmp_path: Path, environment: dict[str, str], launcher: str, alone: list[float]
) -> None:
    """https://github.com/huggingface/accelerate/pull/1452: one started, or two that each trained alone."""
    run_two_ranks(tmp_path, launcher, environment, alone)


@pytest.mark.parametrize(("launcher", "backend"), [("shardlab", "fsdp"), ("torchrun", "zero3")])
def test_the_other_launchers_without_a_compiler_and_with_a_lock_left(
    tmp_path: Path,
    environment: dict[str, str],
    no_compiler: dict[str, str],
    launcher: str,
    backend: str,
    alone: list[float],
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/943: without CUDA_HOME or a compiler it did not even start.

    And https://github.com/pytorch/pytorch/issues/189245: where a killed build had left its lock every later start
    waited for that, in silence.
    """
    extension = tmp_path / "extensions" / "deepspeed_shm_comm"
    extension.mkdir(parents=True)
    (extension / "lock").touch()
    run_two_ranks(tmp_path, launcher, environment | no_compiler, alone, backend=backend)
    assert [file.name for file in extension.iterdir()] == ["lock"], "nothing was built"


def test_a_launcher_that_starts_fewer_ranks_is_found_out(tmp_path: Path, environment: dict[str, str]) -> None:
    """https://github.com/huggingface/accelerate/issues/2741: `--cpu --num_processes 2` runs one."""
    launch = (BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", *MODULE)
    ended = run_process(
        [*launch, "train", write_recipe(tmp_path), "--output", tmp_path / "run", "--nproc", "2"], environment
    )
    assert ended.code != 0
    assert "error: expected 2 ranks, got 1: `accelerate launch --cpu`" in ended.err
    assert "use `accelerate launch --multi_gpu --num_processes 2`" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_hostfile_that_is_missing_is_no_silent_local_run(tmp_path: Path, environment: dict[str, str]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5221: `deepspeed` goes on with what this host has."""
    launch = (BIN / "deepspeed", "--hostfile", tmp_path / "none", "--master_port", free_port(), "--module", "shardlab")
    arguments = ("train", write_recipe(tmp_path), "--output", tmp_path / "run", "--set", "shard.world_size=2")
    ended = run_process([*launch, *arguments], environment)
    assert ended.code != 0
    assert "error: expected 2 ranks, got 1: " in ended.err
    assert "check that the hostfile exists and is the one meant" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_user_s_loop_under_torchrun(tmp_path: Path, environment: dict[str, str]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/2223: three batches on one rank, two on the other, and a hang."""
    schedule = {"name": "constant", "warmup_steps": 0}
    recipe = write_recipe(tmp_path, train={"schedule": schedule}, shard={"micro_batch": 2})
    program = REPOSITORY / "tests" / "train" / "programs" / "five_lines.py"
    alone = run_process([sys.executable, program, recipe, tmp_path / "alone"], environment)
    together = run_process([*TORCHRUN, program, recipe, tmp_path / "together"], environment)
    assert (alone.code, together.code) == (0, 0), together.err
    expected = _losses_of(alone, 0)
    assert len(expected) == 3
    for rank in (0, 1):
        assert _losses_of(together, rank) == pytest.approx(expected, rel=1e-5)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "together"))
    for name, value in first.items():
        assert np.linalg.norm(second[name] - value) <= 1e-5 * np.linalg.norm(value), name


def _losses_of(ended: Ended, rank: int) -> list[float]:
    """Whatever the ranks' lines look like between each other."""
    return [float(text) for text in re.findall(rf"rank {rank} loss (\d+\.\d{{6}})", ended.out)]


class Job:
    """A launcher that runs, and the processes of its job, known by a variable that all of them inherit."""

    def __init__(self, directory: Path, builder: str, backend: str) -> None:
        self._name = uuid.uuid4().hex
        self._mark = directory / "mark"
        self._err = directory / "err"
        recipe = write_recipe(
            directory,
            model={"builder": f"tests.train.builders:{builder}"},
            shard={"micro_batch": 1, "backend": backend},
        )
        command = [sys.executable, *MODULE, "train", str(recipe), "--output", str(directory / "run"), "--nproc", "2"]
        environment = {**os.environ, JOB_VARIABLE: self._name, MARK_VARIABLE: str(self._mark)}
        with self._err.open("wb") as err:
            self.launcher = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
            )

    def wait_for_mark(self) -> None:
        """Until a rank says that it is in the step where things happen."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            ended = self.launcher.poll() is not None  # before the look: the mark was made while it ran
            if self._mark.exists():
                return
            assert not ended, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.05)

    def wait_for_words(self, words: str) -> None:
        """Until the launcher or a rank has written them to stderr."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while words not in self.errors:
            assert self.launcher.poll() is None, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.05)

    def finish(self) -> int:
        """The exit code, which must come in time and leave no process."""
        deadline = time.monotonic() + ALL_GONE_SECONDS
        code = self.launcher.wait(ALL_GONE_SECONDS)
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.alive() == []
        return code

    def alive(self) -> list[psutil.Process]:
        """Processes of the job, wherever they are."""
        return job_processes(self._name)

    @property
    def errors(self) -> str:
        """What the launcher and the ranks wrote to stderr."""
        return self._err.read_text()

    def clean_up(self) -> None:
        """End what a failed test left."""
        end_job(self._name)
        self.launcher.wait()


StartJob = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[StartJob]:
    started: list[Job] = []

    def start(builder: str, backend: str = "ddp") -> Job:
        started.append(Job(tmp_path, builder, backend))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("builder", "backend", "code", "last_line"),
    [
        ("raises_on_rank_1", "ddp", 1, "ValueError: rank one has a bad day"),
        ("exits_on_rank_1", "ddp", 3, "rank 1 ended with exit code 3"),
        ("dies_on_rank_1", "ddp", 128 + signal.SIGKILL, "rank 1 killed by signal 9 (likely out of memory)"),
        # Whose peer waits in shared memory.
        ("raises_on_rank_1", "fsdp", 1, "ValueError: rank one has a bad day"),
        ("dies_on_rank_1", "fsdp", 128 + signal.SIGKILL, "rank 1 killed by signal 9 (likely out of memory)"),
    ],
)
def test_a_rank_that_fails_in_training_ends_the_job(
    job: StartJob, builder: str, backend: str, code: int, last_line: str
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/82: one process had crashed, the others waited and held memory.

    The first failure is the one shown, last and once (https://github.com/pytorch/pytorch/pull/49305).
    """
    failing = job(builder, backend)
    failing.wait_for_mark()
    assert failing.finish() == code
    lines = failing.errors.splitlines()
    if code == 128 + signal.SIGKILL:  # of which the system says no more: so what was predicted comes behind it
        predicted = lines.pop()
        assert predicted.startswith(f"the plan ({backend}, micro-batch 1) predicts 0."), predicted
    assert lines[-1] == last_line
    assert failing.errors.count(last_line) == 1
    assert failing.errors.count("Traceback (most recent call last)") == (builder == "raises_on_rank_1")


@pytest.mark.usefixtures("preloaded")
def test_terminating_the_launcher_in_training_leaves_no_process(job: StartJob) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1016: an interrupted job left its ranks behind."""
    running = job("stays_in_step_2")
    running.wait_for_mark()
    running.launcher.terminate()
    running.wait_for_words("stopping on SIGTERM")
    running.launcher.terminate()  # the ranks are to save after their step, which takes for ever: so the user insists
    assert running.finish() == 128 + signal.SIGTERM
    assert "Traceback" not in running.errors
