"""Which weights go, against torch's own pruning and plain definitions."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from shardlab.compress.sparsity import (
    Amount,
    by_magnitude,
    by_sparsegpt,
    by_wanda,
    parse_amount,
    without_inputs,
)
from shardlab.errors import UserError
from tests.compress.test_second_order import problem

HALF, TWO_OF_FOUR = Amount(0.5), Amount(kept=2, of=4)


def test_amounts() -> None:
    assert parse_amount(0.5, None) == HALF
    assert parse_amount(None, "2:4") == TWO_OF_FOUR
    assert (HALF.name, TWO_OF_FOUR.name) == ("0.5", "2:4")
    for sparsity, pattern in ((None, None), (0.5, "2:4"), (0.0, None), (1.0, None), (None, "4:2"), (None, "half")):
        with pytest.raises(UserError, match="--"):
            parse_amount(sparsity, pattern)


def test_magnitude_is_torchs_own() -> None:
    weight, _, _ = problem()
    layer = nn.Linear(160, 6, bias=False)
    layer.weight.data = weight.clone()
    torch_prune.l1_unstructured(layer, "weight", amount=0.3)
    assert torch.equal(by_magnitude(weight, Amount(0.3)), layer.weight_mask.bool())


def test_wanda_weighs_each_row_by_its_inputs() -> None:
    weight, given, moment = problem()
    stays = by_wanda(weight, HALF, moment)
    assert bool((stays.sum(1) == 80).all())
    score = weight.abs() * given.square().mean(0).sqrt()
    assert float(score[stays].reshape(6, -1).amin(1).sub(score[~stays].reshape(6, -1).amax(1)).min()) >= 0


@pytest.mark.parametrize("amount", [HALF, TWO_OF_FOUR, Amount(kept=4, of=8)])
def test_sparsegpt_loses_less_than_the_others(amount: Amount) -> None:
    weight, given, moment = problem()
    stays, changed = by_sparsegpt(weight, amount, moment)
    assert abs(float((~stays).float().mean()) - 0.5) < 0.01
    assert bool((changed[~stays] == 0).all())
    if amount.of:
        assert bool((stays.reshape(6, -1, amount.of).sum(-1) == amount.kept).all())
    errors = [
        ((one - weight) @ given.T).square().sum().item()
        for one in (changed, weight * by_wanda(weight, amount, moment), weight * by_magnitude(weight, amount))
    ]
    assert errors[0] < 0.9 * min(errors[1:])


def test_narrower_layers_are_set_by_least_squares() -> None:
    """Against lstsq over the rows themselves, in float64."""
    weight, given, moment = problem(inputs=48)
    keep = torch.arange(0, 48, 2)
    got = without_inputs(weight, moment, keep, damping=0.0)
    rows = given.double()
    expected = torch.linalg.lstsq(rows[:, keep], rows @ weight.double().T).solution.T
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)
