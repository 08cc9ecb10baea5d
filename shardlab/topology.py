"""The topology: ranks, devices and memory, as Accelerate's state and the operating system report them.

Accelerate's `PartialState` is the only source of rank, world size and device, whether a launcher, a user's own
`Accelerator` or `torch.distributed` came first. This module alone reads the launchers' environment, and only for
what that state doesn't hold: which host a rank is on, and which launcher to name in a message.

Importing it is light: torch and accelerate are imported when something is detected.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardlab.errors import UserError

if TYPE_CHECKING:
    from accelerate.state import PartialState

Launcher = Literal["shardlab", "torchrun", "accelerate", "deepspeed", "none"]

LAUNCHER_VARIABLE = "SHARDLAB_LAUNCHER"
"""Holds the process id of our launcher in the ranks that it starts (see `shardlab.runtime.launch`)."""

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as 2**63 rounded down to a page


@dataclass(frozen=True)
class Topology:
    """What one rank has, and how many ranks there are. Memory is in bytes."""

    rank: int
    world_size: int
    local_rank: int  # index among the ranks of this host
    local_world_size: int  # ranks on this host
    node: int  # index of this host
    nodes: int
    device: str  # as torch.device takes it: "cpu", "cuda:0"
    host_memory_bytes: (
        int  # of this host, shared by its ranks: the machine's, or the cgroup's limit where that is lower
    )
    device_memory_bytes: int | None  # of this rank's accelerator; None on CPU
    launcher: Launcher

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes what is written once."""
        return self.rank == 0

    @property
    def device_type(self) -> str:
        """The kind of device, without its index: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    @classmethod
    def detect(cls, expected_world_size: int | None = None, timeout_seconds: float = 600) -> "Topology":
        """Join the job and say what there is.

        With several ranks this is a collective that every rank calls: it makes the process group (gloo on CPU) unless
        there is one. `timeout_seconds` is how long a collective of that group waits for a rank.

        Raises UserError when the number of ranks isn't `expected_world_size`, or when an Accelerator made earlier
        doesn't know of the ranks that there are.
        """
        state = _state(timeout_seconds)
        launcher = launcher_name()
        if expected_world_size is not None and state.num_processes != expected_world_size:
            raise UserError(_wrong_world_size(expected_world_size, state.num_processes, launcher))
        node, nodes, local_rank, local_world_size = _hosts(state)
        return cls(
            rank=state.process_index,
            world_size=state.num_processes,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node=node,
            nodes=nodes,
            device="cpu" if state.device.type == "cpu" else str(state.device),
            host_memory_bytes=host_memory_bytes(),
            device_memory_bytes=_device_memory_bytes(state),
            launcher=launcher,
        )


def launcher_name(environment: Mapping[str, str] | None = None) -> Launcher:
    """The launcher that seems to have started this process, for messages only."""
    environment = os.environ if environment is None else environment
    if LAUNCHER_VARIABLE in environment:
        return "shardlab"
    if "ACCELERATE_MIXED_PRECISION" in environment:  # before torchrun, which `accelerate launch` uses
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if "CROSS_RANK" in environment and "LOCAL_SIZE" in environment:
        return "deepspeed"
    return "none"


def announced_rank() -> tuple[int, int]:
    """(rank, world size) that the launcher announced, for a message before the ranks have met; (0, 1) without one.

    Everything else asks `Topology.detect`. The variables are those that Accelerate reads; asking it would import
    torch only to say that a recipe has a typing error.
    """
    rank = _first_integer(("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"), 0)
    return rank, _first_integer(("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), 1)


def _first_integer(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), default)


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the lowest limit of the cgroups (v1, v2) it is in."""
    import psutil

    return min([psutil.virtual_memory().total, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def check_collectives(topology: Topology) -> None:
    """Verify the arithmetic of the collectives that training relies on.

    A backend that sums where it should average scales every gradient by the world size without an error
    (https://github.com/pytorch/pytorch/issues/162338). Every rank calls this.

    Raises RuntimeError that names the collective and the figures.
    """
    if topology.world_size == 1:
        return
    import torch
    import torch.distributed as dist

    world = topology.world_size
    mine = float(topology.rank + 1)
    total = world * (world + 1) / 2

    summed = torch.full((2,), mine, device=topology.device)
    dist.all_reduce(summed)
    _require("all-reduce (sum)", summed.tolist(), total)

    averaged = torch.zeros(2, device=topology.device)
    dist.reduce_scatter_single(averaged, torch.full((2 * world,), mine, device=topology.device), op=dist.ReduceOp.AVG)
    _require("reduce-scatter (average)", averaged.tolist(), total / world)


def _require(collective: str, got: list[float], expected: float) -> None:
    if any(abs(value - expected) > 1e-6 * abs(expected) for value in got):
        raise RuntimeError(
            f"{collective} over the ranks gave {got[0]:g} instead of {expected:g}: "
            "gradients would be scaled in silence; this torch build or communication backend can't be used"
        )


def _state(timeout_seconds: float) -> "PartialState":
    """Accelerate's state, made if nobody has made it, and consistent with torch.distributed.

    Raises UserError where they disagree: each rank would train alone.
    """
    import torch
    import torch.distributed as dist
    from accelerate.state import PartialState

    if not PartialState._shared_state:
        if dist.is_available() and dist.is_initialized():
            _announce_group()
        _limit_threads()
        cpu = not torch.accelerator.is_available()
        # Without an accelerator `cpu=True` is what makes several ranks a gloo group instead of an error about NCCL.
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=timeout_seconds))
    else:
        state = PartialState()

    present = dist.get_world_size() if dist.is_available() and dist.is_initialized() else announced_rank()[1]
    if state.num_processes != present:
        raise UserError(
            f"Accelerate knows of {state.num_processes} process(es) but the launcher started {present}: each would "
            "train alone; create it as Accelerator(cpu=True) on a machine without a GPU "
            '(with DeepSpeed: kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]), or leave it to Engine'
        )
    return state


def _announce_group() -> None:
    """Tell Accelerate of a process group that was made without a launcher's environment, as a test pool does.

    It looks for ranks in the environment before it looks at torch.distributed. Such a group is taken to be on one
    host for the choice of device; a launcher's own variables are left as they are.
    """
    import torch.distributed as dist

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    for name, value in (
        ("RANK", rank),
        ("WORLD_SIZE", world_size),
        ("LOCAL_RANK", rank),
        ("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size)),
    ):
        os.environ.setdefault(name, value)


def _limit_threads() -> None:
    """Share the cores out over this host's ranks where no launcher did.

    Accelerate would give every rank all physical cores when LOCAL_WORLD_SIZE is missing (the deepspeed launcher), and
    fails where the number of physical cores is unknown; OpenMP barriers stall badly with more threads than cores.
    """
    _, world_size = announced_rank()
    if world_size == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size)
    threads = max(1, core_count() // local)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def core_count() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _hosts(state: "PartialState") -> tuple[int, int, int, int]:
    """(node, nodes, local rank, local world size), from what every rank says of its host.

    Asked of the ranks instead of read from a variable, because each launcher names those differently and some don't
    set them. The launcher's node number goes beside the host name: two hosts may share a name.
    """
    if state.num_processes == 1:
        return 0, 1, 0, 1
    import torch.distributed as dist

    launched_node = next((os.environ[name] for name in ("GROUP_RANK", "CROSS_RANK") if name in os.environ), "")
    hosts: list[tuple[str, str]] = [("", "")] * state.num_processes
    dist.all_gather_object(hosts, (socket.gethostname(), launched_node))
    own = hosts[state.process_index]
    distinct = list(dict.fromkeys(hosts))
    return distinct.index(own), len(distinct), hosts[: state.process_index].count(own), hosts.count(own)


def _device_memory_bytes(state: "PartialState") -> int | None:
    if state.device.type == "cpu":
        return None
    import torch

    _free, total = torch.accelerator.get_memory_info(state.device)
    return total


def _cgroup_limits(membership: Path, mount: Path) -> list[int]:
    """Every memory limit in bytes on the way from this process's cgroup up to the root of the mount.

    `membership` has lines `0::/path` (v2) and `4:memory:/path` (v1). In a container the path may not exist below the
    mount, whose root is then the container's own cgroup: so the root is always looked at.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []  # not Linux
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = top / path.lstrip("/")
        for directory in [inner, *(parent for parent in inner.parents if parent.is_relative_to(top))]:
            limit = _read_limit(directory / name)
            if limit is not None:
                limits.append(limit)
    return limits


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None  # no such level, or not ours to read
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def _wrong_world_size(expected: int, got: int, launcher: Launcher) -> str:
    message = f"expected {expected} ranks, got {got}"
    if launcher == "accelerate" and got == 1:
        trap = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        why = "`accelerate launch --cpu` (or use_cpu in its config) starts ONE process; " if trap else ""
        return (
            f"{message}: {why}use `accelerate launch --multi_gpu --num_processes {expected}` (it works without a GPU "
            f"too), `torchrun --nproc-per-node {expected}`, or `shardlab … --nproc {expected}` without a launcher"
        )
    how = {
        "none": f"start it with `--nproc {expected}` and no launcher, or under a launcher with {expected} processes",
        "shardlab": f"use `--nproc {expected}`",
        "torchrun": f"use `torchrun --nproc-per-node {expected}` (times the number of nodes)",
        "accelerate": f"use `accelerate launch --multi_gpu --num_processes {expected}`",
        "deepspeed": f"use `deepspeed --num_gpus {expected}`, and check that the hostfile exists and is the one meant",
    }[launcher]
    return f"{message}: {how}, or set shard.world_size to {got}"
