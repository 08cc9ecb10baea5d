"""bf16 is one thing on every backend: bf16 weights and activations, fp32 masters, moments and gradient sums."""

from dataclasses import replace

import numpy as np
import pytest

from tests.distributed.compare import BACKENDS, assert_close
from tests.distributed.conftest import Run
from tests.distributed.jobs import Case

pytestmark = pytest.mark.slow

FP32 = Case(optimizer="adamw", steps=10, lr=1e-2, micro=4)
BF16 = replace(FP32, precision="bf16")


@pytest.mark.parametrize(("backend", "world"), [("zero3", 1), *((backend, 2) for backend in BACKENDS)])
def test_losses_are_those_of_fp32_and_of_every_other_backend(run: Run, backend: str, world: int) -> None:
    result = run(replace(BF16, backend=backend), world)[0]
    np.testing.assert_allclose(result.losses, run(FP32)[0].losses, rtol=0, atol=2e-2)
    assert_close(result.losses, run(BF16)[0].losses, 1e-3)
    assert_close(result.norms, run(BF16)[0].norms, 2e-2)
    assert result.dtypes == {"torch.bfloat16"}
    assert result.unchanged == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_too_small_for_bf16_add_up_in_the_masters(run: Run, backend: str) -> None:
    """Weights above 1/64 have bf16 neighbours 6e-5 away: updates of 1e-5 made in bf16 would be lost one by one."""
    small = Case(optimizer="adamw", lr=1e-5, steps=20, data="ragged", micro=2)
    result, reference = run(replace(small, backend=backend, precision="bf16"), 2)[0], run(small)[0]
    name = "model.layers.0.self_attn.q_proj.weight"
    large = np.abs(reference.before[name]) > 1 / 64
    expected = (reference.after[name] - reference.before[name])[large]
    moved = (result.after[name] - result.before[name])[large]
    # Loosely: what is compared is rounded to bf16 itself. Without masters hardly any would have moved.
    assert np.mean(moved * np.sign(expected)) == pytest.approx(np.mean(np.abs(expected)), rel=0.25)
