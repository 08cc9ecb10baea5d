"""Real ranks agree on a save, share a failure, and say who saved alone."""

import os
from pathlib import Path

import pytest

from shardlab.checkpoint import read_manifest, verify
from tests.distributed.pool import Pools

pytestmark = pytest.mark.slow

JOBS = "tests.distributed.checkpoint_jobs"


def test_two_ranks_save_at_once_and_in_the_background(pools: Pools, tmp_path: Path) -> None:
    told = pools.run(2, JOBS, "save_together", root=str(tmp_path))
    first, second = str(tmp_path / "step-00000001"), str(tmp_path / "step-00000002")
    assert told == [(first, second, second)] * 2
    verify(Path(first))
    assert [file.name for file in read_manifest(Path(second)).files] == [
        "rank-00000-00000.safetensors",
        "rank-00001-00000.safetensors",
    ]


def test_a_failure_is_told_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    told = pools.run(2, JOBS, "fail_on", root=str(tmp_path), rank=1)
    assert told == ["rank 1: no such file", "no such file"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_saves_alone_is_told_who_called(pools: Pools, tmp_path: Path, rank: int) -> None:
    """Not a hang, and not a collective of the training that another save's answer goes into."""
    told = pools.run(2, JOBS, "save_alone", root=str(tmp_path), rank=rank)
    assert told[1 - rank] == ""
    assert told[rank].startswith(f"rank {rank} called save (step 1) at ")
    assert "checkpoint_jobs.py:" in told[rank]
    assert "not all ranks did within 2 s; every rank has to call it" in told[rank]
