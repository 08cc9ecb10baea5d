"""One run on two ranks, or from the disk, killed twenty times at random points of its saves: `pytest -m soak`."""

import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from shardlab.checkpoint import checkpoints, find_newest
from shardlab.checkpoint.verification import verify
from tests.train.support import REPOSITORY
from tests.train.test_resume import command, steps, write

# Each life begins with the start of the libraries on two ranks: on a busy machine most of the time goes there.
pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(7200)]

LIVES = 20
LIMIT_SECONDS = 900  # for a life to reach the step where it is killed


@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2", "zero3", "fsdp", "stream"])
def test_a_job_killed_twenty_times_goes_on_each_time(tmp_path: Path, backend: str) -> None:
    """SIGKILL to all ranks and the launcher while it saves after every step, in the background and not, in turn."""
    draw = random.Random(backend)
    run = tmp_path / "run"
    recipe = write(tmp_path / "in", train={"steps": 100_000, "optimizer": {"lr": 1e-3}})
    ranks = "--nproc=1" if backend == "stream" else "--nproc=2"
    given = [ranks, f"--set=shard.backend={backend}", "--set=checkpoint.every=1", "--resume=auto"]
    reached = 0
    for life in range(LIVES):
        asynchronous = f"--set=checkpoint.asynchronous={'true' if life % 2 else 'false'}"
        started = command(recipe, run, *given, asynchronous)
        with subprocess.Popen(started, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
            wait_for_step(run, reached + draw.randint(1, 4), job)
            time.sleep(draw.uniform(0, 0.5))
            children = psutil.Process(job.pid).children()
            for process in [*children, job]:
                process.kill()
            job.communicate(timeout=60)
        newest = find_newest(run, say=lambda fault: pytest.fail(fault))  # a kill damages nothing
        verify(newest)
        before, reached = reached, int(newest.name.removeprefix("step-"))
        assert reached > before, f"life {life}"
    last = f"--set=train.stop_after={reached + 2}"
    finish(command(recipe, run, *given, last))
    assert [row["step"] for row in steps(run)] == list(range(1, reached + 3))
    assert not (run / "stream").exists(), "what a killed life left on the disk goes with the next"
    if backend == "stream":  # the others' losses are compared where they are resumed, in test_resume_ranks
        finish(command(recipe, tmp_path / "straight", "--set=shard.backend=ddp", "--set=checkpoint.every=1000", last))
        expected = [row["loss"] for row in steps(tmp_path / "straight")]
        assert [row["loss"] for row in steps(run)] == pytest.approx(expected, rel=1e-3)


def finish(started: list[str]) -> None:
    """To its end, well."""
    ended = subprocess.run(started, cwd=REPOSITORY, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()


def wait_for_step(run: Path, step: int, job: "subprocess.Popen[bytes]") -> None:
    """Until there is a checkpoint of that step or a later one."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not any(found.step >= step for found in checkpoints(run)):
        assert job.poll() is None, job.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)
