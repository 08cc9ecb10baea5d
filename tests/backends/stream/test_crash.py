"""SIGKILL before each operation on the disk, and at random moments: the run goes on as if nothing had happened."""

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardlab.backends.stream import direct, record
from tests.backends.stream.support import Case, running, state_of, train, window

STEPS = 4
CASE = Case("tied llama", rows_elements=512, accumulation=2)


def run_on(directory: Path, case: Case, *, resume: bool) -> tuple[dict[int, float], dict]:
    """Windows from where the directory is, or 0, to the last; losses by step, and the state at the end."""
    losses = {}
    with running(case, directory=directory, resume=resume) as engine:
        for step in range(engine.windows_done, STEPS):
            applied = engine.run_window(window(step, case.accumulation), 1e-2)
            losses[step] = applied.loss_sum / applied.tokens
        return losses, state_of(engine)


def forked(work: Callable[[], object]) -> int:
    """The process id of a child that does `work` and no more; forked, for imports take seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  (pytest, whose copy this is, must not see it)
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    """Its exit code, once it has one."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(directory: Path, case: Case, point: int, *, after: int) -> int:
    """Run with the process killed before the `point`-th write or sync after the window `after` has begun."""

    def work() -> None:
        count = -1

        def tick() -> None:
            nonlocal count
            if count >= 0:
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        def ticking(function: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object, **kwargs: object) -> object:
                tick()
                return function(*args, **kwargs)

            return wrapped

        patches = [
            mock.patch.object(direct.DirectFile, "write", ticking(direct.DirectFile.write)),
            mock.patch.object(direct.DirectFile, "sync", ticking(direct.DirectFile.sync)),
            mock.patch.object(record.RecordFile, "write", ticking(record.RecordFile.write)),
        ]
        with patches[0], patches[1], patches[2], running(case, directory=directory) as engine:
            for step in range(after + 1):
                if step == after:
                    count = 0
                engine.run_window(window(step, case.accumulation), 1e-2)
            os._exit(0)  # the files stay, as after a kill

    return ended(forked(work))


def assert_goes_on(directory: Path, case: Case, straight: tuple[dict[int, float], dict]) -> int:
    losses, state = run_on(directory, case, resume=True)
    expected_losses, expected_state = straight
    assert losses == {step: expected_losses[step] for step in losses}
    assert state.keys() == expected_state.keys()
    assert [key for key, value in state.items() if not torch.equal(value, expected_state[key])] == []
    assert not directory.exists(), "nothing is left behind"
    return min(losses, default=STEPS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict]:
    return run_on(tmp_path_factory.mktemp("straight") / "state", CASE, resume=False)


@pytest.mark.slow
def test_killed_before_each_write(tmp_path: Path, straight: tuple[dict[int, float], dict]) -> None:
    """Within window 2: while the update of window 1 is applied, then while its own gradients are written."""
    resumed_at = []
    for point in range(1, 400):
        directory = tmp_path / str(point)
        code = dying(directory, CASE, point, after=2)
        resumed_at.append(assert_goes_on(directory, CASE, straight))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0, "the window has more points than were tried"
    assert len(resumed_at) > 50
    assert set(resumed_at) == {2, 3}


@pytest.mark.parametrize("point", [1, 20, 45, 70])
def test_killed_at_some_writes(tmp_path: Path, straight: tuple[dict[int, float], dict], point: int) -> None:
    dying(tmp_path / "state", CASE, point, after=2)
    assert_goes_on(tmp_path / "state", CASE, straight)


@pytest.mark.slow
def test_killed_at_20_random_moments(tmp_path: Path, straight: tuple[dict[int, float], dict]) -> None:
    """One life after another on the same files, each ended from outside; also while it takes up what was left."""
    directory, chance = tmp_path / "state", random.Random(0)
    with running(CASE, directory=directory) as engine:
        engine.run_window(window(0, CASE.accumulation), 1e-2)
        engine._store.close(remove=False)  # as a kill does

    def live() -> None:
        with running(CASE, directory=directory, resume=True) as engine:
            for step in range(engine.windows_done, STEPS - 1):
                engine.run_window(window(step, CASE.accumulation), 1e-2)
            time.sleep(600)

    for _ in range(20):
        child = forked(live)
        time.sleep(chance.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL, "it had failed before"
    assert_goes_on(directory, CASE, straight)


def test_a_torn_record_leaves_the_one_before(tmp_path: Path) -> None:
    file = record.RecordFile(tmp_path / "record", create=True)
    first = record.Record((0, 1), (0, 0), sequence=1)
    file.write(first)
    file.write(record.Record((0, 2), (0, 1), 1, 1, record.Pending(0.1, None), 2, {"step": 1}))
    assert file.read().pending == record.Pending(0.1, None)
    with open(tmp_path / "record", "r+b") as raw:
        raw.seek(2 % 2 * record._SLOT + record._HEAD + 5)
        raw.write(b"\0\0\0")
    assert file.read() == first
    file.close()


def test_resumed_state_is_that_of_ddp(tmp_path: Path) -> None:
    dying(tmp_path / "state", CASE, 30, after=2)
    losses, _ = run_on(tmp_path / "state", CASE, resume=True)
    expected = train(CASE, "ddp", STEPS).losses
    assert losses[3] == pytest.approx(expected[3], rel=1e-5)
