"""Backend stream under a limit that the kernel holds, which ends ddp on the same recipe."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.train.support import REPOSITORY, write_recipe

LIMIT_MIB = 800
# 62M parameters: 1 GB of weights, gradients and moments.
MODEL = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048,
         "num_hidden_layers": 7, "num_attention_heads": 12, "tie_word_embeddings": False}  # fmt: skip
_ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of its own with the limit, of version 1 or 2."""
    for root, key in _ROOTS:
        group = root / f"shardlab-{uuid.uuid4().hex}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / key).write_text(str(LIMIT_MIB << 20))
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


def run(group: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`shardlab` inside the group, told of far more memory, so that only the kernel is in its way."""
    code = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from shardlab import topology; topology.host_memory_bytes = lambda: 1 << 40\n"
        "from shardlab.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, cwd=REPOSITORY, env=dict(os.environ), check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_ddp_is_killed_where_stream_is_not(limited: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    recipe = write_recipe(
        tmp_path,
        model={"config": str(config)},
        data={"sequence_length": 128},
        train={"steps": 2},
        shard={"micro_batch": 2},
        checkpoint={"every": 1},
    )
    ended = run(limited, "train", recipe, "--output", tmp_path / "ddp", "--set=shard.backend=ddp")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    stream = ("--set=shard.backend=stream", f"--set=shard.memory_limit={LIMIT_MIB}MiB")
    ended = run(limited, "train", recipe, "--output", tmp_path / "stream", *stream)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "stream" / "model" / "model.safetensors").exists()
    assert (tmp_path / "stream" / "checkpoints" / "step-00000002").exists()
