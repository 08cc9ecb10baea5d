"""What a save leaves behind: when it succeeds, fails on one rank, meets a full disk, or is overtaken by the next."""

import errno
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardlab.checkpoint import AsyncSaver, CheckpointReader, Contents, DamagedError, Ranks, Saver, checkpoints, verify
from shardlab.checkpoint.storage import LocalStorage, Writer
from shardlab.errors import UserError
from shardlab.state.box import Box
from shardlab.state.fragment import MASTER, Fragment
from tests.checkpoint.support import TIMEOUT_SECONDS, on_ranks, same, small_state, succeed, whole_fragments


def steps(root: Path) -> list[int]:
    return [one.step for one in checkpoints(root)]


def hidden(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".")]


class FailingStorage(LocalStorage):
    """Refuses new files of one rank."""

    def __init__(self, rank: int, error: OSError):
        self._prefix = f"rank-{rank:05d}"
        self._error = error

    def create(self, path: Path) -> Writer:
        if path.name.startswith(self._prefix):
            raise self._error
        return super().create(path)


class GatedStorage(LocalStorage):
    """Waits before the first file is written."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def create(self, path: Path) -> Writer:
        assert self.gate.wait(TIMEOUT_SECONDS)
        return super().create(path)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 1.5], start=1):
        saver.save(Contents(step=step, evaluation=loss), whole_fragments(small_state(step)))
    assert steps(tmp_path) == [2, 4, 5]


def test_nothing_older_is_deleted_unless_the_newer_verifies(tmp_path: Path) -> None:
    class Losing(LocalStorage):
        def sync_directory(self, directory: Path) -> None:
            if directory == tmp_path and (tmp_path / "step-00000003").exists():
                next((tmp_path / "step-00000003").glob("*.safetensors")).write_bytes(b"")
            super().sync_directory(directory)

    saver = Saver(tmp_path, keep=1, storage=Losing())
    saver.save(Contents(step=1), whole_fragments(small_state()))
    saver.save(Contents(step=2), whole_fragments(small_state()))
    with pytest.raises(DamagedError, match="nothing older is deleted"):
        saver.save(Contents(step=3), whole_fragments(small_state()))
    assert steps(tmp_path) == [2, 3]


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """Step 3 was damaged, so the run resumed from 1 and saved 2: that is the one to keep."""
    saver = Saver(tmp_path, keep=1)
    for step in (1, 3):
        Saver(tmp_path, keep=9).save(Contents(step=step), whole_fragments(small_state(step)))
    (tmp_path / "step-00000003" / "rank-00000-00000.safetensors").unlink()
    saver.save(Contents(step=2), whole_fragments(small_state(2)))
    assert steps(tmp_path) == [2, 3]
    path = saver.save(Contents(step=3), whole_fragments(small_state(3)))  # replaces the damaged one
    verify(path)
    assert steps(tmp_path) == [3]
    assert hidden(tmp_path) == []


def test_left_overs_of_dead_saves_are_cleaned(tmp_path: Path) -> None:
    for name in (".step-00000001.partial-0a", ".step-00000002.deleted-0b", ".step-00000003.replaced-0c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / ".other").mkdir()
    Saver(tmp_path).save(Contents(step=4), whole_fragments(small_state()))
    assert hidden(tmp_path) == [".other"]
    assert steps(tmp_path) == [3, 4]  # the replaced one had not been replaced yet


def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    state = {(f"w{n}", MASTER): torch.randn(10) for n in range(4)}

    def save(ranks: Ranks) -> Path:
        storage = FailingStorage(1, OSError(errno.EIO, "Input/output error"))
        return Saver(tmp_path, ranks, storage=storage).save(Contents(step=1), whole_fragments(state))

    first, second = on_ranks(2, save)
    assert isinstance(first, RuntimeError)
    assert "rank 1: [Errno 5]" in str(first)
    assert isinstance(second, OSError)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_under_one_rank(tmp_path: Path) -> None:
    state = {(f"w{n}", MASTER): torch.randn(10) for n in range(4)}
    succeed(on_ranks(2, lambda ranks: Saver(tmp_path, ranks).save(Contents(step=1), whole_fragments(state))))

    def save(ranks: Ranks) -> Path:
        storage = FailingStorage(1, OSError(errno.ENOSPC, "No space left on device"))
        return Saver(tmp_path, ranks, storage=storage).save(Contents(step=2), whole_fragments(state))

    for error in on_ranks(2, save):
        assert isinstance(error, UserError)
        assert "disk full: the checkpoint step-00000002 needs" in str(error)
        assert "the newest checkpoint is still step-00000001" in str(error)
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


class Optimist(LocalStorage):
    """Believes that there is room, as when another program fills the disk meanwhile."""

    asked = 0

    def free_bytes(self, directory: Path) -> int:
        self.asked += 1
        return 1 << 40 if self.asked == 1 else super().free_bytes(directory)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("checked", [True, False])
def test_a_full_disk(small_disk: Path, checked: bool, asynchronous: bool) -> None:
    """Found before writing, or in the middle of it: the last checkpoint stays, and nothing is left over."""
    root = small_disk / "checkpoints"
    small = {("w", MASTER): torch.randn(1 << 18)}  # 1 MiB
    large = {("w", MASTER): torch.randn(1 << 20)}  # 4 MiB
    first = Saver(root).save(Contents(step=1), whole_fragments(small))
    saver = Saver(root, storage=LocalStorage() if checked else Optimist())

    def save() -> None:
        if not asynchronous:
            saver.save(Contents(step=2), whole_fragments(large))
            return
        with AsyncSaver(saver) as background:
            background.save(Contents(step=2), whole_fragments(large))
            background.wait()

    said = r"disk full: the checkpoint .* needs 5\.0 MiB, .* has [23]\.\d MiB free"
    with pytest.raises(UserError, match=said) as raised:
        save()
    assert "the newest checkpoint is still step-00000001" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert os.listdir(root) == ["step-00000001"]
    verify(first)
    saver.trial()


def test_a_trial_save_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    succeed(on_ranks(2, lambda ranks: Saver(root, ranks).trial()))
    assert os.listdir(root) == []


def test_a_trial_save_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written"):
        Saver(tmp_path / "file" / "checkpoints").trial()
    refused = FailingStorage(1, OSError(errno.EROFS, "Read-only file system"))
    errors = on_ranks(2, lambda ranks: Saver(tmp_path / "root", ranks, storage=refused).trial())
    assert all(isinstance(error, UserError) for error in errors)
    assert os.listdir(tmp_path / "root") == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep"):
        Saver(tmp_path, keep=0)


def test_fragments_that_change_between_the_two_calls(tmp_path: Path) -> None:
    calls = iter([["a", "b"], ["b", "a"], ["a", "b"], ["a"]])

    def fragments() -> list[Fragment]:
        return [Fragment(name, MASTER, (2,), Box((0,), (2,)), torch.zeros(2)) for name in next(calls)]

    with pytest.raises(RuntimeError, match=r"b\|master\|0 came where a\|master\|0 was announced"):
        Saver(tmp_path).save(Contents(step=1), fragments)
    with pytest.raises(RuntimeError, match="never came: b"):
        Saver(tmp_path).save(Contents(step=1), fragments)
    assert os.listdir(tmp_path) == []


# --- in the background


def test_a_snapshot_is_saved_whatever_happens_to_the_state_after(tmp_path: Path) -> None:
    state = {key: tensor.clone() for key, tensor in small_state(1).items()}
    storage = GatedStorage()
    with AsyncSaver(Saver(tmp_path, storage=storage)) as saver:
        assert saver.save(Contents(step=1), whole_fragments(state)) is None
        for tensor in state.values():
            tensor.fill_(9)
        assert saver.poll() is None
        assert steps(tmp_path) == []
        storage.gate.set()
        assert saver.wait() == tmp_path / "step-00000001"
        assert saver.poll() is None
    with CheckpointReader(tmp_path / "step-00000001") as reader:
        for (name, kind), tensor in small_state(1).items():
            into = torch.empty(tensor.shape, dtype=tensor.dtype)
            reader.read_into(name, kind, Box((0,) * tensor.ndim, tuple(tensor.shape)), into)
            assert same(into, tensor)


def test_a_second_save_waits_for_the_first_and_uses_its_memory(tmp_path: Path) -> None:
    with AsyncSaver(Saver(tmp_path)) as saver:
        state = small_state(1)
        saver.save(Contents(step=1), whole_fragments(state))
        places = {copy.data_ptr() for copy in saver._copies.values()}
        assert saver.save(Contents(step=2), whole_fragments(state)) == tmp_path / "step-00000001"
        assert {copy.data_ptr() for copy in saver._copies.values()} == places
    assert steps(tmp_path) == [1, 2]


def test_ranks_in_the_background_finish_at_the_same_poll(tmp_path: Path) -> None:
    state = {(f"w{n}", MASTER): torch.randn(100) for n in range(4)}
    slow = GatedStorage()

    def run(ranks: Ranks) -> list[int]:
        done = []
        with AsyncSaver(Saver(tmp_path, ranks, keep=1, storage=slow if ranks.rank == 1 else None)) as saver:
            for step in range(1, 200):
                if step % 50 == 1:
                    saver.save(Contents(step=step), whole_fragments(state))
                if step == 20:
                    assert steps(tmp_path) == []
                    slow.gate.set()
                if saver.poll() is not None:
                    done.append(step)
        return done

    first, second = succeed(on_ranks(2, run))
    assert first == second
    assert steps(tmp_path) == [151]


def test_a_failure_in_the_background_is_reported_and_the_next_save_works(tmp_path: Path) -> None:
    state = {(f"w{n}", MASTER): torch.randn(10) for n in range(4)}

    def run(ranks: Ranks) -> int:
        storage = FailingStorage(1, OSError(errno.ENOSPC, "No space left on device"))
        saver = Saver(tmp_path, ranks, storage=storage)
        with AsyncSaver(saver) as background:
            background.save(Contents(step=1), whole_fragments(state))
            calls = itertools.count()

            def poll_until_told() -> None:
                while next(calls) >= 0:
                    assert background.poll() is None

            with pytest.raises(UserError, match="disk full"):
                poll_until_told()
            assert steps(tmp_path) == []
            saver.storage = LocalStorage()
            background.save(Contents(step=2), whole_fragments(state))
        return next(calls)

    counts = succeed(on_ranks(2, run))
    assert counts[0] == counts[1]
    assert steps(tmp_path) == [2]
    assert hidden(tmp_path) == []
