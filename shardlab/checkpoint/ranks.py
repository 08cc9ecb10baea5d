"""How the ranks of a job agree on a checkpoint: all have done their part, or none goes on.

Agreement has a gloo group of its own. So a `save` that one rank calls alone waits for its peers there, instead of
meeting a collective of the training, and the time-out can name who called it.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, Protocol, TypeVar

from shardlab.errors import UserError
from shardlab.topology import Topology

Value = TypeVar("Value")


class Ranks(Protocol):
    """The ranks of a job, this one among them. All methods are collective."""

    rank: int
    world_size: int

    def meet(self, what: str) -> None:
        """Wait for all. Raises RuntimeError that says `what` was called where, if not all come in time."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, on every rank."""
        ...

    def all(self, flag: bool) -> bool:
        """Whether it is set on every rank; cheap enough for every step."""
        ...


class Alone:
    """One process, without a group."""

    rank = 0
    world_size = 1

    def meet(self, what: str) -> None:
        """See `Ranks.meet`."""

    def gather(self, value: Value) -> list[Value]:
        """See `Ranks.gather`."""
        return [value]

    def all(self, flag: bool) -> bool:
        """See `Ranks.all`."""
        return flag


class Processes:
    """The processes of a job. Making it is collective."""

    def __init__(self, topology: Topology, timeout_seconds: float = 600):
        import torch.distributed as dist

        self.rank = topology.rank
        self.world_size = topology.world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def meet(self, what: str) -> None:
        """See `Ranks.meet`."""
        import torch.distributed as dist

        try:
            dist.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            seconds = self._timeout.total_seconds()
            raise RuntimeError(
                f"rank {self.rank} called {what} at {_caller()}, but not all ranks did within {seconds:g} s; "
                f"every rank has to call it ({error})"
            ) from error

    def gather(self, value: Value) -> list[Value]:
        """See `Ranks.gather`."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all(self, flag: bool) -> bool:
        """See `Ranks.all`."""
        import torch
        import torch.distributed as dist

        told = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        return bool(told[0])


def join(topology: Topology, timeout_seconds: float = 600) -> Ranks:
    """The ranks of `topology`; with several of them a collective."""
    return Alone() if topology.world_size == 1 else Processes(topology, timeout_seconds)


class Agreement(Generic[Value]):
    """`with Agreement(ranks) as agreed: agreed.value = …`: afterwards `agreed.values` holds every rank's.

    Collective. An exception on any rank is raised on all: its own there, and elsewhere one that names that rank.
    """

    value: Value
    values: list[Value]

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def __enter__(self) -> Agreement[Value]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # this process is being ended: its peers learn it from the launcher
        said = None if error is None else (isinstance(error, UserError), f"{error}" or repr(error))
        told = self._ranks.gather((said, getattr(self, "value", None)))
        if error is not None:
            return
        for rank, (fault, _) in enumerate(told):
            if fault is not None:
                mendable, message = fault
                raise (UserError if mendable else RuntimeError)(f"rank {rank}: {message}")
        self.values = [value for _, value in told]  # type: ignore[misc]


def _caller() -> str:
    """The innermost place in somebody's program, or where there is none (our command) outside this part of ours."""
    here, package = Path(__file__).parent, Path(__file__).parents[1]
    frame: FrameType | None = sys._getframe(1)
    places = []
    while frame is not None:
        places.append((Path(frame.f_code.co_filename), frame.f_lineno))
        frame = frame.f_back
    theirs = (place for place in places if package not in place[0].parents and place[0].is_file())
    file, line = next(theirs, None) or next(place for place in places if place[0].parent != here)
    return f"{file}:{line}"
