import errno
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from shardlab.data.cache import cache_root, cached
from shardlab.errors import UserError


def _build(directory: Path) -> None:
    (directory / "content").write_text("built")


def _load(directory: Path) -> str:
    return (directory / "content").read_text()


def _refuse(directory: Path) -> None:
    raise AssertionError("built although it was there")


def test_what_is_there_is_not_built_again(tmp_path):
    assert cached(tmp_path, "key", _build, _load) == "built"
    assert cached(tmp_path, "key", _refuse, _load) == "built"


@pytest.mark.parametrize("content", ["bui", "b?ilt", None])
def test_a_damaged_entry_is_built_again(tmp_path, content, caplog):
    cached(tmp_path, "key", _build, _load)
    file = tmp_path / "key" / "content"
    file.unlink() if content is None else file.write_text(content)
    assert cached(tmp_path, "key", _build, _load) == "built"
    assert "damaged" in caplog.text


def test_a_damaged_manifest_is_damage(tmp_path):
    cached(tmp_path, "key", _build, _load)
    (tmp_path / "key" / "manifest.json").write_text("[1")
    assert cached(tmp_path, "key", _build, _load) == "built"


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail(directory: Path) -> None:
        _build(directory)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        cached(tmp_path, "key", fail, _load)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_a_full_disk_is_the_users_to_mend(tmp_path):
    def fill(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"cannot write the cache .*No space left.*set data\.cache_dir"):
        cached(tmp_path, "key", fill, _load)


def test_a_cache_that_is_a_file_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the cache"):
        cached(tmp_path / "file", "key", _build, _load)


def _run_builder(root: Path, seconds: float, events: Connection) -> None:
    def build(directory: Path) -> None:
        events.send("building")
        (directory / "content").write_text("half")
        time.sleep(seconds)
        (directory / "content").write_text("built")

    events.send(cached(root, "key", build, _load))


def _start_builder(root: Path, seconds: float) -> tuple[BaseProcess, Connection]:
    """Forked, since importing torch would take longer than the test; the child uses files only."""
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=_run_builder, args=(root, seconds, sending), daemon=True)
    process.start()
    sending.close()
    return process, receiving


def _events(process: BaseProcess, receiving: Connection) -> list[str]:
    process.join(60)
    events = []
    while receiving.poll():
        try:
            events.append(receiving.recv())
        except EOFError:
            break
    return events


def test_of_two_processes_one_builds_and_both_read(tmp_path):
    builders = [_start_builder(tmp_path, 0.5) for _ in range(2)]
    assert sorted((_events(*builder) for builder in builders), key=len) == [["built"], ["building", "built"]]


def test_a_killed_builder_neither_blocks_nor_leaves_half_an_entry(tmp_path):
    process, receiving = _start_builder(tmp_path, 600.0)
    assert receiving.recv() == "building"
    process.kill()
    process.join(60)
    assert cached(tmp_path, "key", _build, _load) == "built"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_the_root_is_the_recipes_then_the_environments(monkeypatch):
    monkeypatch.setenv("SHARDLAB_CACHE", "/from/environment")
    assert cache_root("/from/recipe") == Path("/from/recipe")
    assert cache_root(None) == Path("/from/environment")
    monkeypatch.delenv("SHARDLAB_CACHE")
    assert cache_root(None) == Path.home() / ".cache/shardlab"
