"""How much each layer minds being rounded, measured layer by layer; and widths allotted by it.

A trial rounds one layer, to nearest, while all others are as they were: the divergence of the likeliest next tokens at
the model's end is what that layer and width cost. For small errors such costs add up, as each is quadratic in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardlab.compress.packed import pack, stored_bits
from shardlab.compress.walk import Batch, Segment, Walk
from shardlab.errors import UserError
from shardlab.model.grid import find_scales
from shardlab.model.schemes import Scheme

Costs = Mapping[str, Mapping[Scheme, float]]
"""Nats for a token, by layer and scheme."""


def measure(
    walk: Walk, candidates: Mapping[str, Sequence[Scheme]], dtype: torch.dtype, batches: Sequence[Batch]
) -> dict[str, dict[Scheme, float]]:
    """The divergence that each candidate of each layer costs by itself, over the tokens of `batches`.

    One block is in memory at a time, with the hidden states of all the trials of another: each block's trials go
    through the blocks that follow.
    """

    def trials(segment: Segment) -> Iterator[tuple[str, Scheme]]:
        for name, layer in segment.linears.items():
            original = layer.weight.detach().clone()
            for scheme in candidates.get(name, ()):
                layer.weight.copy_(_nearest(original, scheme, dtype))
                yield name, scheme
            layer.weight.copy_(original)

    costs: dict[str, dict[Scheme, float]] = {}
    for (name, scheme), quality in walk.try_each(trials, batches):
        costs.setdefault(name, {})[scheme] = quality.divergence
    return costs


def _nearest(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    return pack(weight, find_scales(weight, scheme.grid, dtype), scheme, dtype)[1]


@dataclass(frozen=True)
class Allotment:
    """A scheme for each layer; bits for a weight as they lie on the disk, and the sum of the costs measured."""

    schemes: dict[str, Scheme]
    bits: float
    cost: float


def allot(costs: Costs, shapes: Mapping[str, tuple[int, int]], target: float, fixed: Mapping[str, Scheme]) -> Allotment:
    """The schemes of least cost whose weights take at most `target` bits on average, those of `fixed` layers counted.

    From the fewest bits on, the step that saves the most cost for a bit is taken next, as long as one fits. That, or
    one width for all if it costs less, is then bettered by changing two layers at a time, until no pair gains. Raises
    UserError where the fewest bits are too many.
    """
    options = {name: _useful(of_layer, shapes[name]) for name, of_layer in costs.items()}
    weights = sum(shapes[name][0] * shapes[name][1] for name in (*options, *fixed))
    spent = sum(stored_bits(scheme, *shapes[name]) for name, scheme in fixed.items())
    budget = target * weights - spent
    least = sum(points[0].bits for points in options.values())
    if least > budget:
        fewest = (least + spent) / weights
        raise UserError(f"--target-bits {target:g}: with these widths and groups the least is {fewest:.3f}")
    starts = [_by_gain(options, budget), *(one for one in _uniform(options) if _bits(one) <= budget)]
    best = _by_pairs(min(starts, key=_cost), options, budget)
    schemes = {name: point.scheme for name, point in best.items()}
    return Allotment({**schemes, **fixed}, (_bits(best) + spent) / weights, _cost(best))


@dataclass(frozen=True)
class _Point:
    scheme: Scheme
    bits: int
    cost: float


Options = Mapping[str, Sequence[_Point]]
"""Of each layer, those that it may become, of fewer bits and more cost first."""


def _bits(chosen: Mapping[str, _Point]) -> int:
    return sum(point.bits for point in chosen.values())


def _cost(chosen: Mapping[str, _Point]) -> float:
    return sum(point.cost for point in chosen.values())


def _useful(costs: Mapping[Scheme, float], shape: tuple[int, int]) -> list[_Point]:
    """The schemes of a layer in order of their bits, without those that cost as much with more of them."""
    points = sorted((stored_bits(scheme, *shape), cost, scheme.name, scheme) for scheme, cost in costs.items())
    useful: list[_Point] = []
    for bits, cost, _, scheme in points:
        if not useful or cost < useful[-1].cost:
            useful.append(_Point(scheme, bits, cost))
    return useful


def _by_gain(options: Options, budget: float) -> dict[str, _Point]:
    chosen = {name: points[0] for name, points in options.items()}
    left = budget - _bits(chosen)
    while True:
        steps = [
            ((chosen[name].cost - point.cost) / (point.bits - chosen[name].bits), name, point)
            for name, points in options.items()
            for point in points
            if 0 < point.bits - chosen[name].bits <= left
        ]
        if not steps:
            return chosen
        _, name, point = max(steps, key=lambda step: step[0])
        left -= point.bits - chosen[name].bits
        chosen[name] = point


def _by_pairs(chosen: Mapping[str, _Point], options: Options, budget: float) -> dict[str, _Point]:
    chosen = dict(chosen)
    moves = [(number, name, point) for number, (name, points) in enumerate(options.items()) for point in points]
    layers = np.array([number for number, _, _ in moves])
    while True:
        bits = np.array([point.bits - chosen[name].bits for _, name, point in moves])
        costs = np.array([point.cost - chosen[name].cost for _, name, point in moves])
        together = costs[:, None] + costs
        together[(bits[:, None] + bits > budget - _bits(chosen)) | (layers[:, None] == layers)] = np.inf
        one, other = np.unravel_index(together.argmin(), together.shape)
        if not together[one, other] < 0:
            return chosen
        before = _cost(chosen)
        changed = {**chosen, **{moves[place][1]: moves[place][2] for place in (one, other)}}
        if _cost(changed) >= before:  # a gain of rounding alone would go on for ever
            return chosen
        chosen = changed


def _uniform(options: Options) -> Iterator[dict[str, _Point]]:
    """One scheme for all layers, each that all of them may have."""
    for scheme in (point.scheme for point in next(iter(options.values()))):
        found = {n: point for n, points in options.items() for point in points if point.scheme == scheme}
        if len(found) == len(options):
            yield found
