"""The launcher, with real ranks and real kills: who failed first, the exit code, and nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_SECONDS = 25  # for an end that takes five; torch's agent alone would wait 30 s for a rank that ignores TERM
START_SECONDS = 240  # importing torch in five processes on two busy cores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="process groups and signals of Unix"),
]


class Job:
    """A launcher in a process of its own, and the processes of its job, whose ids the ranks wrote down."""

    def __init__(self, mode: str, directory: Path) -> None:
        self.directory = directory / "ranks"
        self.directory.mkdir()
        self._out, self._err = directory / "out", directory / "err"
        environment = {**os.environ, "TMPDIR": str(directory), "PYTHONWARNINGS": "ignore"}
        environment.pop("OMP_NUM_THREADS", None)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.launcher = subprocess.Popen(
                [sys.executable, str(PROGRAMS / "launcher.py"), mode, str(self.directory)],
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_for(self, pattern: str, count: int) -> None:
        """Until the ranks have written so many files."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            ended = self.launcher.poll() is not None  # before the look: what they wrote they wrote while it ran
            if len(list(self.directory.glob(pattern))) >= count:
                return
            assert not ended, self.errors
            assert time.monotonic() < deadline, f"the ranks did not start: {self.errors}"
            time.sleep(0.05)

    def finish(self, limit_seconds: float = LIMIT_SECONDS) -> int:
        """The launcher's exit code, which must come within the limit and leave no process of the job."""
        code = self.launcher.wait(limit_seconds)
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.alive() == []
        return code

    def alive(self) -> list[int]:
        """Those of the job's processes that still run (a zombie waits for init only)."""
        pids = [int(pid) for file in self.directory.glob("*.pids") for pid in file.read_text().split()]
        return [pid for pid in pids if psutil.pid_exists(pid) and _status(pid) != psutil.STATUS_ZOMBIE]

    @property
    def errors(self) -> str:
        """What the launcher and the ranks wrote to stderr."""
        return self._err.read_text()

    def clean_up(self) -> None:
        """End what a failed test left."""
        for pid in [*([self.launcher.pid] if self.launcher.poll() is None else []), *self.alive()]:
            os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Job]:
    def start(mode: str) -> Job:
        started = Job(mode, tmp_path)
        request.addfinalizer(started.clean_up)
        return started

    return start


def test_first_failure_is_the_one_shown(job: Callable[[str], Job]) -> None:
    """https://github.com/pytorch/pytorch/pull/49305: the peers' broken collectives are not the failure.

    Its traceback comes last and once, and no process is left (https://github.com/deepspeedai/DeepSpeed/issues/1995).
    """
    raised = job("raise-gloo")
    raised.wait_for("*.pids", 4)
    assert raised.finish() == 1
    assert raised.errors.rstrip().endswith("ValueError: rank two has a bad day")
    assert raised.errors.count("Traceback (most recent call last)") == 1
    assert "rank 2 failed:" in raised.errors
    assert "Connection closed" not in raised.errors


def test_killed_rank_ends_the_job(job: Callable[[str], Job]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/82: one process is killed, the others wait for ever."""
    killed = job("kill-gloo")
    killed.wait_for("*.pids", 4)
    assert killed.finish() == 128 + signal.SIGKILL
    assert killed.errors.splitlines()[-1] == "rank 2 killed by signal 9 (likely out of memory)"
    assert "Traceback" not in killed.errors


def test_blocked_rank_is_named(job: Callable[[str], Job]) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/17248: a rank that never arrives blocks the others."""
    blocked = job("block-gloo")
    blocked.wait_for("*.pids", 4)
    assert blocked.finish(4 + LIMIT_SECONDS) == 1  # the collective's own time-out is 4 s
    assert blocked.errors.count("Traceback (most recent call last)") == 1
    assert "a collective timed out: ranks 0, 1, 3 waited in it\nrank 2 did not arrive" in blocked.errors
    assert "in act" in blocked.errors.split("rank 2 was here:")[1]


def test_exit_code_of_a_rank_is_the_jobs(job: Callable[[str], Job]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/714: a rank calls exit(3), and the job says 3."""
    exited = job("exit")
    exited.wait_for("*.pids", 4)
    assert exited.finish() == 3
    assert exited.errors.splitlines() == ["rank 2 ended with exit code 3"]


def test_user_error_of_every_rank_is_one_line(job: Callable[[str], Job]) -> None:
    wrong = job("user")
    assert wrong.finish(START_SECONDS) == 2
    assert wrong.errors == "error: the recipe has no such key: mend it\n"


def test_failure_is_told_if_all_ranks_end_between_two_looks(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_LOOK", "1")
    wrong = job("user")
    assert wrong.finish(START_SECONDS) == 2
    assert wrong.errors == "error: the recipe has no such key: mend it\n"


def test_rank_that_ignores_term_is_killed(job: Callable[[str], Job]) -> None:
    """torch's agent alone would wait 30 s for each."""
    stubborn = job("stubborn")
    stubborn.wait_for("*.pids", 4)
    assert stubborn.finish() == 1
    assert stubborn.errors.rstrip().endswith("ValueError: rank two has a bad day")


def test_done(job: Callable[[str], Job], tmp_path: Path) -> None:
    """Ranks that end well leave nothing either: not their children, nor the launcher's files."""
    done = job("done")
    assert done.finish(START_SECONDS) == 0
    assert done.errors == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "out", "ranks"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGINT, 128 + 2), (signal.SIGKILL, -9)]
)
def test_ending_the_launcher_ends_the_job(
    job: Callable[[str], Job], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1016: interrupted, it left processes that held memory."""
    waiting = job("wait")
    waiting.wait_for("*.pids", 4)
    waiting.launcher.send_signal(number)
    assert waiting.finish() == code
    assert "Traceback" not in waiting.errors
    deadline = time.monotonic() + LIMIT_SECONDS
    while list(tmp_path.glob("shardlab-*")) and time.monotonic() < deadline:
        time.sleep(0.05)  # after SIGKILL the guard removes it
    assert list(tmp_path.glob("shardlab-*")) == []


def test_ranks_can_save_on_a_signal(job: Callable[[str], Job]) -> None:
    """A scheduler's TERM to the launcher reaches the ranks, and a code that they agree on is the job's."""
    saved = job("saved")
    saved.wait_for("handler-*", 4)
    saved.launcher.terminate()
    assert saved.finish() == 75


def test_ranks_that_save_and_stop_are_no_failure(job: Callable[[str], Job]) -> None:
    """One rank is signalled and all agree to stop; those that go first do not take the others with them."""
    stopping = job("stop")
    assert stopping.finish(START_SECONDS) == 75
    assert stopping.errors == ""


def test_a_warning_signal_reaches_the_ranks(job: Callable[[str], Job]) -> None:
    """Schedulers warn with USR1 some time before the end; the launcher must not die of it."""
    warned = job("usr1")
    warned.wait_for("handler-*", 4)
    warned.launcher.send_signal(signal.SIGUSR1)
    assert warned.finish() == 75


@pytest.mark.parametrize(("allowed", "code"), [(1, 1), (3, 0)])
def test_ranks_start_again_after_a_failure(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch, allowed: int, code: int
) -> None:
    """The third life works; from the second on they are told to resume."""
    monkeypatch.setenv("RESTARTS", str(allowed))
    lives = job("restart")
    assert lives.finish(START_SECONDS) == code
    assert lives.errors.count("ValueError: rank two has a bad day") == min(allowed + 1, 2)
    assert f"restart 1 of {allowed}: 4 ranks start again" in lives.errors
    assert [path.read_text() for path in sorted(lives.directory.glob("life-2-*"))][:2] == ["", "--resume"]


def test_what_the_user_can_mend_is_not_tried_again(job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTARTS", "2")
    mistaken = job("user")
    assert mistaken.finish(START_SECONDS) == 2
    assert "start again" not in mistaken.errors
