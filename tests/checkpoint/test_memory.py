"""A 200 MiB checkpoint is saved, verified and read with a few MiB beside the state. Field case B46."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.checkpoint.load import BUFFER_BYTES

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_process_grows_by_its_buffers_and_no_more(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/6658"""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.growth", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert set(found) == {"save", "verify", "export", "rows", "rows converted", "columns"}
    for what, grown in found.items():
        assert grown < 2 * BUFFER_BYTES, f"{what} grew by {grown / 1024**2:.1f} MiB"
