"""Checkpoints are saved, verified, read and converted with little beside the state. Field case B46."""

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.checkpoint.diff import differences
from shardlab.checkpoint.load import BUFFER_BYTES
from tests.checkpoint.sized import TENSOR_BYTES

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
        assert grown < 3 * BUFFER_BYTES, f"{what} grew by {grown / 1024**2:.1f} MiB"


def converted(root: Path, tensors: int) -> None:
    """`tests.checkpoint.sized` takes at most two of the largest tensors and 150 MB above the libraries."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.sized", str(root), str(tensors)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for what, of in json.loads(done.stdout.splitlines()[-1]).items():
        assert of["code"] == 0, f"{what}: {done.stderr}"
        assert of["peak"] - of["base"] < 2 * TENSOR_BYTES + 150 * 10**6, what
    same = filecmp.cmp(root / "model" / "model.safetensors", root / "unlimited" / "model.safetensors", shallow=False)
    assert same, "the limit changed what was written"


@pytest.mark.slow
def test_1_2_gb_of_four_ranks_is_converted_within_600_mb(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/6658, at its size: killed, where all of it was held."""
    converted(tmp_path, tensors=8)


@pytest.mark.slow
def test_every_conversion_streams(tmp_path: Path) -> None:
    """And what comes back is what went; options of the groups that were not named have torch's defaults."""
    converted(tmp_path, tensors=2)
    ours = tmp_path / "ours" / "step-00000007"
    for back in ("from-dcp", "from-zero3"):
        found = differences(ours, tmp_path / back / "step-00000007")
        assert [one.name for one in found] == ["optimizer"], back
