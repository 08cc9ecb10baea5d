"""Jobs that are run once each, however many tests look at them."""

from collections.abc import Callable

import pytest

from tests.distributed.jobs import Case, Outcome
from tests.distributed.pool import Pools

Run = Callable[..., list[Outcome]]


@pytest.fixture(scope="session")
def run(pools: Pools) -> Run:
    """`run(case, world)`: the outcomes of all ranks."""
    known: dict[tuple[Case, int], list[Outcome]] = {}

    def run(case: Case, world: int = 1) -> list[Outcome]:
        if (case, world) not in known:
            known[case, world] = pools.run(world, "tests.distributed.jobs", "train", case=case)
        return known[case, world]

    return run
