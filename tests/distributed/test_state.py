"""Training state from any backend at any world size to any other: values, moments, and the next steps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.distributed.compare import BACKENDS, assert_bit_equal, assert_close
from tests.distributed.pool import Pools
from tests.distributed.reader import Assembled
from tests.distributed.state_jobs import Outcome, StateCase

pytestmark = pytest.mark.slow
JOBS = "tests.distributed.state_jobs"


@dataclass
class Saved:
    """What all ranks of a job hold together, and what rank 0 says."""

    state: Assembled
    first: Outcome
    ranks: list[Outcome]


Save = Callable[..., Saved]
Load = Callable[..., Saved]


def _together(outcomes: list[Outcome]) -> Saved:
    for outcome in outcomes:
        assert outcome.optimizer == outcomes[0].optimizer, "every rank must know the same"
        assert outcome.losses == outcomes[0].losses
        assert outcome.collectives == 0
        assert outcome.unchanged == []
    pieces = [piece for outcome in outcomes for piece in outcome.pieces]
    return Saved(Assembled.of(pieces, outcomes[0].optimizer), outcomes[0], outcomes)


@pytest.fixture(scope="module")
def save(pools: Pools) -> Save:
    """`save(case, world)`: a job's state after some updates, and how it went on; each job is run once."""
    known: dict[tuple[StateCase, int], Saved] = {}

    def save(case: StateCase, world: int) -> Saved:
        if (case, world) not in known:
            known[case, world] = _together(pools.run(world, JOBS, "save", case=case))
        return known[case, world]

    return save


@pytest.fixture(scope="module")
def load(pools: Pools) -> Load:
    """`load(state, case, world)`: a job that starts from `state`."""

    def load(state: Assembled, case: StateCase, world: int) -> Saved:
        return _together(pools.run(world, JOBS, "load", case=case, state=state))

    return load


def assert_same_state(one: Assembled, other: Assembled) -> None:
    """Every tensor of every kind in every bit, and the optimizer's numbers and groups by name."""
    assert one.tensors.keys() == other.tensors.keys()
    assert [key for key, value in one.tensors.items() if not np.array_equal(value, other.tensors[key])] == []
    assert one.dtypes == other.dtypes
    assert one.optimizer.kinds == other.optimizer.kinds
    assert one.optimizer.scalars == other.optimizer.scalars
    groups = [[group["names"] for group in state.optimizer.groups] for state in (one, other)]
    assert groups[0] == groups[1]


# Every ordered pair of backends at 2 ranks each, and once more at numbers of ranks such that each backend is left and
# entered at 1, 2, 3 and 4 ranks, and each pair of numbers occurs.
WORLDS = [
    (source, 1 + (i + j) % 4, target, 1 + (i + 2 * j) % 4)
    for i, source in enumerate(BACKENDS)
    for j, target in enumerate(BACKENDS)
]
PAIRS = [(source, 2, target, 2) for source in BACKENDS for target in BACKENDS]


def test_the_design_covers_what_it_says() -> None:
    assert {(n, m) for _, n, _, m in WORLDS} == {(n, m) for n in range(1, 5) for m in range(1, 5)}
    assert {(source, n) for source, n, _, _ in WORLDS} == {(b, n) for b in BACKENDS for n in range(1, 5)}
    assert {(target, m) for _, _, target, m in WORLDS} == {(b, m) for b in BACKENDS for m in range(1, 5)}


@pytest.mark.parametrize(("source", "n", "target", "m"), dict.fromkeys([*PAIRS, *WORLDS]), ids=lambda value: str(value))
def test_any_to_any(save: Save, load: Load, source: str, n: int, target: str, m: int) -> None:
    saved = save(StateCase(source), n)
    loaded = load(saved.state, StateCase(target), m)
    assert_same_state(loaded.state, saved.state)
    assert_bit_equal(loaded.first.weights, saved.first.weights)
    if (source, n) == (target, m):
        assert loaded.first.losses == saved.first.losses
    assert_close(loaded.first.losses, saved.first.losses, 1e-6)
