"""SIGKILL at every point of a save, and at random times: there is always a checkpoint that verifies. Field case B41."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlab.checkpoint import CheckpointReader, checkpoints, clean, find_newest
from shardlab.state.box import Box
from tests.checkpoint import killed
from tests.checkpoint.support import same

REPOSITORY = Path(__file__).parents[2]
POINTS = 60  # more than a save has


def check(root: Path) -> int:
    """The step of the newest whole checkpoint, its values those of that step."""
    clean(root)
    assert [name for name in os.listdir(root) if name.startswith(".")] == []
    lines: list[str] = []
    path = find_newest(root, say=lines.append)
    assert lines == []  # none was damaged: what is there under a checkpoint's name is whole
    with CheckpointReader(path) as reader:
        step = reader.manifest.step
        entry = reader.entry("w1", "master")
        (size,) = entry.shape
        for (name, kind), tensor in killed.state(step, size).items():
            into = tensor.new_empty(tensor.shape)
            for piece in reader.entry(name, kind).pieces:
                box = Box(piece.offsets, piece.lengths)
                reader.read_into(name, kind, box, into[box.slices])
            assert same(into, tensor)
    return step


def in_a_child(*arguments: str) -> int:
    """`killed.main`'s exit code; forked, for imports take seconds."""
    child = os.fork()
    if child == 0:
        try:
            killed.main(Path(arguments[0]), *arguments[1:])
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at", "replace"])
def test_killed_before_each_operation(tmp_path: Path, how: str) -> None:
    """`at`: while step 2 is saved and then step 1 deleted. `replace`: while step 1 is saved anew over itself."""
    ended = []
    for point in range(1, POINTS):
        root = tmp_path / str(point)
        code = in_a_child(str(root), how, str(point))
        step = check(root)
        if code == 0:
            break
        assert code == -9
        ended.append(step)
        if point % 3:
            continue
        assert in_a_child(str(root), how) == 0  # the run's next life saves as if nothing had been
        assert check(root) == (1 if how == "replace" else 2)
    assert len(ended) >= 20
    assert ended == sorted(ended)  # first the old one, from some point on the new one
    assert how == "replace" or set(ended) == {1, 2}


@pytest.mark.slow
def test_killed_at_random_times(tmp_path: Path) -> None:
    random_ = random.Random(0)
    last = 0
    for _ in range(5):
        command = [sys.executable, "-m", "tests.checkpoint.killed", str(tmp_path), "loop"]
        child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        time.sleep(random_.uniform(0, 0.1))
        child.kill()
        child.communicate()
        step = check(tmp_path)
        assert step >= last + 1
        assert len(checkpoints(tmp_path)) <= 2
        last = step
