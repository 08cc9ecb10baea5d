"""Rounding, against plain definitions."""

import pytest
import torch

from shardlab.model.grid import Grid, find_scales, for_columns, rounded


def weights(outputs: int = 12, inputs: int = 64) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("grid", [Grid(8), Grid(4, 32), Grid(3, 8), Grid(2, 32)])
def test_each_weight_moves_by_half_a_step_at_most_or_is_clipped(grid: Grid) -> None:
    weight = weights()
    scale = for_columns(find_scales(weight, grid, torch.float32), 64)
    got = rounded(weight, scale, grid)
    low, high = grid.lowest * scale, grid.highest * scale
    inside = (weight >= low) & (weight <= high)
    assert float(((got - weight).abs() - scale / 2)[inside].max()) <= 1e-6
    torch.testing.assert_close(got[~inside], weight.clamp(low, high)[~inside], rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(2, 16), Grid(8)])
def test_shrinking_a_range_never_costs(grid: Grid) -> None:
    """The chosen scales leave no larger error than the largest value's own."""
    weight = weights()
    whole = weight.reshape(12, grid.groups(64), -1).abs().amax(-1) / ((2**grid.bits - 1) / 2)
    chosen = find_scales(weight, grid, torch.float32)
    errors = [(rounded(weight, for_columns(one, 64), grid) - weight).square().sum().item() for one in (chosen, whole)]
    assert errors[0] <= errors[1] * (1 + 1e-6)
    assert grid.bits == 8 or errors[0] < 0.99 * errors[1]


def test_importance_decides_what_is_clipped() -> None:
    """A single large value that no input ever meets is not worth a coarse step for all others."""
    weight = 0.1 * torch.linspace(-1, 1, 32)[None]
    weight[0, 0] = 0.16
    importance = torch.ones(32)
    importance[0] = 0.0
    plain = find_scales(weight, Grid(4, 32), torch.float32).item()
    weighed = find_scales(weight, Grid(4, 32), torch.float32, importance).item()
    assert weighed < plain


def test_zeros_stay_zeros() -> None:
    weight = weights()
    weight[weight.abs() < 0.7] = 0.0
    weight[0] = 0.0  # a whole row
    grid = Grid(4, 32)
    got = rounded(weight, for_columns(find_scales(weight, grid, torch.bfloat16), 64), grid)
    assert bool((got[weight == 0] == 0).all())
    assert bool(got.isfinite().all())


def test_scales_are_values_that_the_file_can_hold() -> None:
    scale = find_scales(weights(), Grid(4, 32), torch.bfloat16)
    assert torch.equal(scale, scale.bfloat16().float())


def test_bits_per_weight_count_the_scales() -> None:
    assert Grid(4, 32).bits_per_weight(128) == 4.5
    assert Grid(8).bits_per_weight(128) == 8.125
