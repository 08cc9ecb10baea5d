"""The loss is the same everywhere: each backend, world size and micro-batch against one process.

In this order: gradients, which show an error at once; a few steps of SGD, which add clipping; AdamW, which forgives a
wrong scale but not a wrong direction.
"""

from dataclasses import replace

import pytest

from tests.distributed.compare import (
    BACKENDS,
    assert_bit_equal,
    assert_close,
    assert_tensors_agree,
    changes,
)
from tests.distributed.conftest import Run
from tests.distributed.jobs import Case

pytestmark = pytest.mark.slow

# The weights after one step of SGD without clipping show the gradient; the large rate keeps its digits.
GRADIENT = Case(steps=1, lr=100.0, clip=None)
SGD = Case(steps=3, lr=1.0, clip=1.0)
ADAMW = Case(optimizer="adamw", steps=20, lr=1e-2, clip=1.0)

LAYOUTS = [(1, 8), (2, 1), (2, 4), (4, 1), (4, 2)]  # (world size, micro-batch) of a global batch of 8


def _id(layout: tuple[int, int]) -> str:
    return f"{layout[0]}x{layout[1]}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_at_step_0(run: Run, backend: str, layout: tuple[int, int]) -> None:
    world, micro = layout
    result = run(replace(GRADIENT, backend=backend, micro=micro), world)[0]
    reference = run(GRADIENT)[0]
    assert_bit_equal(result.before, reference.before)
    assert_tensors_agree(
        changes(result.before, result.after), changes(reference.before, reference.after), tolerance=1e-5
    )
    assert_close(result.norms, reference.norms, 1e-6)


@pytest.mark.parametrize("layout", [(1, 2), (2, 2), (4, 1)], ids=_id)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_after_3_steps_of_sgd(run: Run, backend: str, layout: tuple[int, int]) -> None:
    world, micro = layout
    reference = run(SGD)[0]
    assert min(reference.norms) > 1.0, "the gradient must be above the limit, or clipping isn't tested"
    result = run(replace(SGD, backend=backend, micro=micro), world)[0]
    assert_tensors_agree(result.after, reference.after, tolerance=1e-5)
    assert_close(result.losses, reference.losses, 1e-5)
    assert_close(result.norms, reference.norms, 1e-5)


@pytest.mark.parametrize("layout", [(1, 4), (2, 4), (4, 2)], ids=_id)
@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_and_norms_of_20_steps_of_adamw(run: Run, backend: str, layout: tuple[int, int]) -> None:
    world, micro = layout
    reference = run(ADAMW)[0]
    assert reference.losses[-1] < reference.losses[0]
    results = run(replace(ADAMW, backend=backend, micro=micro), world)
    assert_close(results[0].losses, reference.losses, 1e-5)
    assert_close(results[0].norms, reference.norms, 1e-5)
    assert_close(results[0].evaluation, reference.evaluation, 1e-5)
    for result in results:
        assert result.unchanged == []
        assert (result.losses, result.norms, result.evaluation) == (
            results[0].losses,
            results[0].norms,
            results[0].evaluation,
        ), "every rank must report the same figures"
