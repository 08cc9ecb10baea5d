"""Collectives through shared memory: the same sums as gloo's, no waiting for the dead, nothing left over."""

import os
from dataclasses import replace

import pytest

from tests.distributed.jobs import Case
from tests.distributed.pool import Pools

JOBS = "tests.distributed.shared_memory_jobs"

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory without a name are Linux's")


@pytest.mark.parametrize("world", [2, 4])
def test_it_gathers_and_sums_what_gloo_does(pools: Pools, world: int) -> None:
    # Sizes of which two lie beside each other in the memory and sizes of which they don't, one after another.
    sizes = [1, 7, 64, 100, 1000, 999, 30, 1000, 1000, 3, 500, 500, 500, 17]
    for same in pools.run(world, JOBS, "collectives", sizes=sizes, largest=1000):
        assert same == [True] * (2 * len(sizes))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_that_through_gloo_to_the_last_bit(pools: Pools, precision: str) -> None:
    case = Case(backend="fsdp", optimizer="adamw", lr=1e-2, steps=3, micro=2, precision=precision)
    ours, theirs = (
        pools.run(2, "tests.distributed.jobs", "train", case=replace(case, shared_memory=shared))[0]
        for shared in (True, False)
    )
    assert (ours.losses, ours.norms, ours.evaluation) == (theirs.losses, theirs.norms, theirs.evaluation)


@pytest.mark.parametrize("refused_on", [0, 1])
def test_all_ranks_do_without_where_one_cannot(pools: Pools, refused_on: int) -> None:
    assert pools.run(2, JOBS, "without_memory", refused_on=refused_on) == [True, True]


@pytest.mark.parametrize(("does", "told"), [("hangs up", "closed by peer"), ("stays away", "timed out")])
def test_a_lost_peer_is_a_collective_that_failed(pools: Pools, does: str, told: str) -> None:
    kind, message, seconds = pools.run(2, JOBS, "failure_when_a_peer", does=does)[0]
    assert kind == "collective"  # so that the rank which caused it is named first
    assert told in message
    assert seconds < 15


def test_nothing_is_left_that_a_kill_could_leave(pools: Pools) -> None:
    assert pools.run(2, JOBS, "left_over") == [([], 1, 0)] * 2
