"""A NaN or an infinity on one rank stops the update on all of them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.distributed.compare import BACKENDS, assert_bit_equal, assert_close, assert_tensors_agree, in_one_process
from tests.distributed.conftest import Run
from tests.distributed.jobs import Case
from tests.distributed.pool import Pools

pytestmark = pytest.mark.slow

POISONED = Case(optimizer="adamw", steps=5, lr=1e-2, poison_step=3, micro=4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_activations_on_the_last_rank_touch_no_weight(run: Run, backend: str, precision: str) -> None:
    """https://github.com/huggingface/trl/issues/6702: the curve looked healthy while the optimizer applied a NaN."""
    outcomes = run(replace(POISONED, backend=backend, precision=precision), 2)
    for outcome in outcomes:
        assert outcome.skipped == [False, False, False, True, False]
        assert not np.isfinite(outcome.losses[3]), "the true value, not a mean of those before"
        assert not np.isfinite(outcome.norms[3])
    assert_bit_equal(*outcomes[0].around_poison)
    assert all(np.isfinite(value).all() for value in outcomes[0].after.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_run_goes_on_as_if_the_step_had_not_been(run: Run, backend: str) -> None:
    """Moments and their step count are those before it, too."""
    case = replace(POISONED, backend=backend)
    result, reference = run(case, 2)[0], run(in_one_process(case))[0]
    assert_close(result.losses[:3] + result.losses[4:], reference.losses[:3] + reference.losses[4:], 1e-5)
    assert_tensors_agree(result.after, reference.after, tolerance=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinite_loss_with_a_finite_gradient_is_no_better(pools: Pools, backend: str) -> None:
    outcomes = pools.run(
        2,
        "tests.distributed.linear_jobs",
        "step",
        case=Case(backend, lr=1.0),
        losses=((1.0,), (2.0,), (3.0,), (4.0,)),
        infinite_loss_on=1,
    )
    for outcome in outcomes:
        assert outcome.applied.skipped
        assert outcome.applied.loss_sum == float("inf")
        np.testing.assert_array_equal(outcome.before, outcome.after)
