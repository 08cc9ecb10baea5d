"""Making up for errors, against solving each step's least squares outright."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.compress.second_order import DAMPING, compensated, output_error


def problem(inputs: int = 160, tokens: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    given = torch.randn(tokens, inputs, generator=generator) @ mixed
    return torch.randn(6, inputs, generator=generator), given, given.T @ given / tokens


def round_all(_part: Tensor, _places: slice, _roots: Tensor) -> Callable[[Tensor, int], Tensor]:
    return lambda column, _place: (column * 4).round() / 4


def test_each_column_is_made_up_for_by_least_squares() -> None:
    """In float64, one column after another: the rest is set to what minimises the damped output error.

    A change without steps, since a rounding that falls to the other side would hide what is compared.
    """
    weight, _given, moment = problem(inputs=140)  # more than one block
    damped = (moment + DAMPING * moment.diagonal().mean() * torch.eye(140)).double()
    expected = weight.double().clone()
    for place in range(140):
        change = -0.1 * expected[:, place]
        rest = slice(place + 1, None)
        # min over d of (change, d) H (change, d)T: d = -change * H[place, rest] H[rest, rest]^-1
        expected[:, rest] -= change[:, None] * torch.linalg.solve(damped[rest, rest], damped[rest, place])
        expected[:, place] += change
    got = compensated(weight, moment, lambda _part, _places, _roots: lambda column, _place: 0.9 * column)
    assert float((got.double() - expected).norm() / expected.norm()) < 1e-4


def test_what_comes_out_is_what_the_change_gave() -> None:
    weight, _given, moment = problem(inputs=140)
    got = compensated(weight, moment, round_all)
    assert torch.equal((got * 4).round() / 4, got)


def test_it_beats_rounding_alone() -> None:
    weight, given, moment = problem()
    plain = (weight * 4).round() / 4
    better = compensated(weight, moment, round_all)
    errors = [((w - weight) @ given.T).square().sum().item() for w in (better, plain)]
    assert errors[0] < 0.8 * errors[1]
    assert abs(output_error(better - weight, moment) * len(given) / errors[0] - 1) < 1e-3


def test_inputs_that_are_never_used_get_no_weight() -> None:
    weight, given, _ = problem()
    given[:, 7] = 0.0
    moment = given.T @ given
    got = compensated(weight, moment, round_all)
    assert bool((got[:, 7] == 0).all())


def test_fewer_tokens_than_inputs_still_have_an_answer() -> None:
    weight, given, _ = problem()
    moment = given[:20].T @ given[:20] / 20
    assert bool(compensated(weight, moment, round_all).isfinite().all())
