"""A memory limit that the kernel holds, and the command under it."""

import errno
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.train.support import REPOSITORY

_ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextmanager
def memory_limit(mebibytes: int) -> Iterator[Path]:
    """A memory cgroup of its own with the limit, of version 1 or 2. Skips where none can be made."""
    for root, key in _ROOTS:
        group = root / f"shardlab-{uuid.uuid4().hex}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / key).write_text(str(mebibytes << 20))
            except OSError:
                group.rmdir()
                continue
            yield group
            remove(group)
            return
    pytest.skip("no memory cgroup can be made here: it takes root, or a delegated one")


def remove(group: Path) -> None:
    """Once the last of its processes is gone, which may be one that the command had started and did not wait for."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def run_under(group: Path, *arguments: str | Path, told: bool = False) -> subprocess.CompletedProcess[str]:
    """`shardlab` inside the group; unless `told` of the limit, it takes far more memory for there, so that only the
    kernel is in its way."""
    code = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    if not told:
        code += "from shardlab import topology; topology.host_memory_bytes = lambda: 1 << 40\n"
    code += "from shardlab.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, cwd=REPOSITORY, env=dict(os.environ), check=False,
    )  # fmt: skip
