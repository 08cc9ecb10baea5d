"""Topology: one rank, several under a launcher, a group that someone else made, and jobs that aren't what was asked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardlab import topology
from shardlab.errors import UserError
from shardlab.topology import Topology, launcher_name

CLEAN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "CROSS_",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "SHARDLAB_",
    "MASTER_",
    "OMP_",
)

SHOW = r"""
import sys
from shardlab.runtime.child import run_rank
from shardlab.topology import Topology, check_collectives
def main():
    topology = Topology.detect(expected_world_size=2, timeout_seconds=300)
    check_collectives(topology)
    figures = (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size, topology.nodes)
    line = " ".join([*map(str, figures), topology.device, topology.launcher])
    sys.stdout.write(line + "\n")  # in one piece: the ranks share the output
sys.exit(run_rank(main))
"""

# A rank of a process group that was made without a launcher's environment, as test pools and notebooks do.
POOLED = """
import sys
import torch.distributed as dist
from shardlab.errors import UserError
from shardlab.topology import Topology, check_collectives
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
first = Topology.detect()
assert (first.rank, first.world_size, first.local_rank, first.local_world_size) == (rank, 2, rank, 2), first
assert Topology.detect(expected_world_size=2) == first  # the state exists by now
check_collectives(first)
try:
    Topology.detect(expected_world_size=4)
except UserError as error:
    assert "expected 4 ranks, got 2" in str(error)
right = dist.reduce_scatter_single
dist.reduce_scatter_single = lambda output, input, op: right(output, input, op=dist.ReduceOp.SUM)
try:
    check_collectives(first)
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(CLEAN)}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and no state of Accelerate before or after."""
    from accelerate.state import AcceleratorState, PartialState

    for name in os.environ:
        if name.startswith(CLEAN):
            monkeypatch.delenv(name)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


@pytest.mark.usefixtures("fresh")
def test_one_process() -> None:
    import torch

    found = Topology.detect(expected_world_size=1)
    assert (found.rank, found.world_size, found.local_world_size, found.nodes) == (0, 1, 1, 1)
    assert found.is_main
    assert found.launcher == "none"
    assert 0 < found.host_memory_bytes <= psutil.virtual_memory().total
    assert (found.device_memory_bytes is None) == (not torch.accelerator.is_available())
    assert torch.device(found.device).type == found.device_type
    topology.check_collectives(found)


@pytest.mark.usefixtures("fresh")
def test_more_ranks_expected() -> None:
    with pytest.raises(UserError, match="expected 2 ranks, got 1: start it with `--nproc 2`"):
        Topology.detect(expected_world_size=2)


@pytest.mark.usefixtures("fresh")
def test_accelerator_that_knows_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain Accelerator with DeepSpeed or FSDP on CPU says one process on every rank, and each trains alone."""
    from accelerate import Accelerator

    Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="knows of 1 process"):
        Topology.detect()


@pytest.mark.slow
def test_accelerate_launch_cpu_starts_one_process(tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/2741: asked for two processes, got one, without a word."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "error: expected 2 ranks, got 1: `accelerate launch --cpu`" in done.stderr
    assert "accelerate launch --multi_gpu --num_processes 2" in done.stderr


@pytest.mark.slow
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 1 cpu torchrun", "1 2 1 2 1 cpu torchrun"]


@pytest.mark.slow
def test_group_that_someone_else_made(tmp_path: Path) -> None:
    """And a backend that sums where it should average is found out: https://github.com/pytorch/pytorch/issues/162338"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", POOLED, str(rank), str(tmp_path / "store")],
            env={**clean_environment(), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=400)
        assert rank.returncode == 0, err
        assert "reduce-scatter (average) over the ranks gave 3 instead of 1.5" in out


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "none"),
        ({"SHARDLAB_LAUNCHER": "1", "TORCHELASTIC_RUN_ID": "x"}, "shardlab"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "TORCHELASTIC_RUN_ID": "x"}, "accelerate"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"CROSS_RANK": "0", "LOCAL_SIZE": "2"}, "deepspeed"),
    ],
)
def test_launcher_names(environment: dict[str, str], launcher: str) -> None:
    assert launcher_name(environment) == launcher


def test_lowest_cgroup_limit_counts(tmp_path: Path) -> None:
    """v1 and v2, at any level above the process; what is missing or unlimited says nothing."""
    membership = tmp_path / "cgroup"
    membership.write_text("9:name=systemd:/\n4:cpu,memory:/job/step\n0::/slice/job\n")
    for path, content in {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/job/memory.limit_in_bytes": "3000000000",
        "memory/job/step/memory.limit_in_bytes": "4000000000",
        "slice/memory.max": "2000000000",
        "slice/job/memory.max": "max",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content + "\n")
    assert sorted(topology._cgroup_limits(membership, tmp_path)) == [2000000000, 3000000000, 4000000000]
    assert topology._cgroup_limits(tmp_path / "missing", tmp_path) == []
