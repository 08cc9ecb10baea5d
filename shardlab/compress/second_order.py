"""Changing weights one input at a time, each change made up for by the inputs still to come (GPTQ, SparseGPT).

What a linear layer is given in calibration says which errors matter: with H the second moment of its inputs, the
error of an output row is e H eT. The method is Frantar's (arXiv 2210.17323 and 2301.00774).
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 128  # inputs between two updates of everything behind them
DAMPING = 0.01  # of H's mean diagonal, added to it

Change = Callable[[Tensor, slice, Tensor], Callable[[Tensor, int], Tensor]]
"""(weights of a block's inputs, which change as columns are made up for; their places; for each the root of what an
error there can't be made up for by) -> a function of (a column as it is by then, its place in the block) that gives the
column's final values. What is decided for a whole block, such as a mask, is decided in the first."""


def compensated(weight: Tensor, moment: Tensor, change: Change) -> Tensor:
    """`weight` (outputs, inputs) with `change` applied, the error spread over inputs to the right of each.

    `moment` (inputs, inputs) is the layer's second moment of inputs. Inputs that were always zero get weight zero
    before. All in fp32.
    """
    weight, moment = weight.clone(), moment.clone()
    inputs = weight.shape[1]
    diagonal = moment.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1.0
    weight[:, unused] = 0.0
    factor = _inverse_factor(moment)
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        part, inside = weight[:, start:end], factor[start:end, start:end]
        column_change = change(part, slice(start, end), inside.diagonal())
        errors = torch.empty_like(part)
        for place in range(end - start):
            column = part[:, place]
            final = column_change(column, place)
            error = (column - final) / inside[place, place]
            part[:, place + 1 :] -= error[:, None] * inside[place, place + 1 :]
            part[:, place] = final
            errors[:, place] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight


def output_error(difference: Tensor, moment: Tensor) -> float:
    """Sum over the output rows of e H eT: the squared error of the layer's outputs over what was calibrated with."""
    return float((difference @ moment).mul_(difference).sum())


def _inverse_factor(moment: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped moment's inverse."""
    damping = DAMPING * moment.diagonal().mean()
    for _ in range(4):  # fewer rows than inputs leave a moment that rounding makes indefinite
        moment.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(moment)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return factor
        damping = damping * 10
    raise RuntimeError("the layer's inputs have no usable second moment: are there infinite or NaN values among them?")
