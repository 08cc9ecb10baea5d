"""Saves by real ranks; run by the pool."""

from pathlib import Path

import torch

from shardlab.checkpoint import AsyncSaver, Contents, Saver, find_newest
from shardlab.checkpoint.ranks import Processes
from shardlab.errors import UserError
from shardlab.state.box import Box
from shardlab.state.fragment import MASTER, Fragment
from shardlab.topology import Topology


def half(rank: int) -> list[Fragment]:
    """Half of the rows of a (4, 3) tensor."""
    return [Fragment("w", MASTER, (4, 3), Box((2 * rank, 0), (2, 3)), torch.full((2, 3), float(rank)))]


def save_together(root: str) -> tuple[str, str, str]:
    """Save at once, then in the background; the newest one found, and what was saved."""
    topology = Topology.detect()
    saver = Saver(Path(root), Processes(topology))
    first = saver.save(Contents(step=1), lambda: half(topology.rank))
    with AsyncSaver(saver) as background:
        background.save(Contents(step=2), lambda: half(topology.rank))
        while (second := background.poll()) is None:
            continue
    return str(first), str(second), str(find_newest(Path(root), saver.ranks))


def save_alone(root: str, rank: int) -> str:
    """One rank saves and the other does not; what it is told."""
    topology = Topology.detect()
    ranks = Processes(topology, timeout_seconds=2)
    said = ""
    if topology.rank == rank:
        try:
            Saver(Path(root), ranks).save(Contents(step=1), lambda: half(topology.rank))
        except RuntimeError as error:
            said = str(error)
    return said


def fail_on(root: str, rank: int) -> str:
    """A rank whose fragments can't be read; what each is told."""
    topology = Topology.detect()

    def fragments() -> list[Fragment]:
        if topology.rank == rank:
            raise UserError("no such file")
        return half(topology.rank)

    try:
        Saver(Path(root), Processes(topology)).save(Contents(step=1), fragments)
    except UserError as error:
        return str(error)
    return ""
