"""Rounding weights to few integers: the scales, and the error that it makes.

Formulas as `compressed-tensors` stores and reads them, which is the format that vLLM and transformers load: a weight is
an integer of `bits` with sign times a scale, one for each group of inputs of each output row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SHRINKS = 20  # scales tried below the largest that a group's values need
SMALLEST_SHRINK = 0.6


@dataclass(frozen=True)
class Grid:
    """What a weight (outputs, inputs) is rounded to. `group_size` None: one scale for a whole output row."""

    bits: int
    group_size: int | None = None

    @property
    def lowest(self) -> int:
        """The smallest integer."""
        return -(2 ** (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1

    def groups(self, inputs: int) -> int:
        """Scales of one output row of a layer with `inputs` inputs."""
        return 1 if self.group_size is None else inputs // self.group_size

    def bits_per_weight(self, inputs: int, scale_bits: int = 16) -> float:
        """What a weight takes on disk, its share of the scales included."""
        return self.bits + self.groups(inputs) * scale_bits / inputs


def find_scales(weight: Tensor, grid: Grid, dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """The scales (outputs, groups), in fp32, for `weight` (outputs, inputs; fp32) that leave the least squared error.

    They are values that `dtype` can hold. Each group's range is tried whole and shrunk: clipping a few large values can
    cost less than rounding all others coarsely. `importance` (inputs,) weighs each input's error; the mean square of
    what the layer was given is the natural one.
    """
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, grid.groups(inputs), -1)
    weighing = None if importance is None else importance.reshape(1, grouped.shape[1], grouped.shape[2])
    whole = grouped.abs().amax(-1) * 2 / (grid.highest - grid.lowest)
    best, least = torch.ones_like(whole), torch.full_like(whole, torch.inf)
    for step in range(SHRINKS + 1):
        shrink = 1 - (1 - SMALLEST_SHRINK) * step / SHRINKS
        tried = (whole * shrink).to(dtype).float()
        tried = torch.where(tried > 0, tried, torch.ones_like(tried))  # a group of zeros
        squared = (rounded(grouped, tried[..., None], grid) - grouped).square_()
        error = (squared if weighing is None else squared.mul_(weighing)).sum(-1)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def rounded(weight: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The values of the grid nearest to `weight`; `scale` must broadcast to it."""
    return (weight / scale).round_().clamp_(grid.lowest, grid.highest).mul_(scale)


def for_columns(scale: Tensor, inputs: int) -> Tensor:
    """`scale` (outputs, groups) for each input: (outputs, inputs)."""
    return scale.repeat_interleave(inputs // scale.shape[1], 1)
