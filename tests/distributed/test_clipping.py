"""Losses, gradients and norms known in closed form: one Linear(4, 1) whose inputs set each row's loss."""

import numpy as np
import pytest

from tests.distributed.compare import BACKENDS
from tests.distributed.jobs import Case
from tests.distributed.linear_jobs import LinearOutcome, Losses
from tests.distributed.pool import Pools

pytestmark = pytest.mark.slow


def step(pools: Pools, world: int, case: Case, losses: Losses) -> LinearOutcome:
    outcome: LinearOutcome = pools.run(world, "tests.distributed.linear_jobs", "step", case=case, losses=losses)[0]
    return outcome


@pytest.mark.parametrize(("clip", "change"), [(None, 200.0), (1.0, 1.0)])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_is_what_was_asked_for(
    pools: Pools, backend: str, world: int, clip: float | None, change: float
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8068: DeepSpeed clips at 1.0 without the key."""
    outcome = step(pools, world, Case(backend, lr=1.0, clip=clip), ((400.0,), (400.0,)))
    assert np.linalg.norm(outcome.after - outcome.before) == pytest.approx(change, rel=1e-5)
    assert outcome.applied.grad_norm == pytest.approx(200.0, rel=1e-6)  # before clipping


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_of_unlike_size_are_weighted_by_their_tokens(pools: Pools, backend: str, world: int) -> None:
    """https://github.com/huggingface/trl/issues/2175: the mean of the means would be 3."""
    outcome = step(pools, world, Case(backend, lr=1.0, clip=None), ((1.0,) * 6, (5.0,) * 2))
    assert outcome.applied.loss_sum / outcome.applied.tokens == 2.0
    np.testing.assert_allclose(outcome.before - outcome.after, 2.0 / 4, rtol=1e-6)
