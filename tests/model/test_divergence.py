"""Divergences against their definitions in float64, and in the head's chunks against whole logits."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from shardlab.data.window import IGNORED
from shardlab.model.divergence import DIVERGENCES, Divergence
from shardlab.model.head import HeadLoss

HIDDEN, VOCABULARY = 16, 50
ALL = [Divergence(name, temperature, 0.3) for name in DIVERGENCES for temperature in (1.0, 2.5)]


def defined(divergence: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """T² x the divergence of each row, as it is written in the papers."""
    p, q = (torch.softmax(scores / divergence.temperature, -1) for scores in (teacher, student))
    b = divergence.mixture

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one.log() - other.log())).sum(-1)

    values = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: b * kl(p, b * p + (1 - b) * q) + (1 - b) * kl(q, b * p + (1 - b) * q),
        "skew_kl": lambda: kl(p, b * p + (1 - b) * q),
        "skew_reverse_kl": lambda: kl(q, (1 - b) * p + b * q),
    }
    return values[divergence.name]() * divergence.temperature**2


@pytest.mark.parametrize("divergence", ALL, ids=str)
def test_value_and_gradient(divergence: Divergence) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(7, 11, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    expected = defined(divergence, student.requires_grad_(), teacher)
    expected.sum().backward()
    value, gradient = divergence(student.detach(), teacher, differentiate=True)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-10, atol=1e-12)
    alone, nothing = divergence(student.detach(), teacher, differentiate=False)
    assert torch.equal(alone, value)
    assert nothing is None


@pytest.mark.parametrize("divergence", ALL, ids=str)
def test_scores_far_apart_stay_finite(divergence: Divergence) -> None:
    student, teacher = torch.tensor([[0.0, 300.0, 0.0]]), torch.tensor([[300.0, 0.0, -300.0]])
    value, gradient = divergence(student, teacher, differentiate=True)
    exact, _ = divergence(student.double(), teacher.double(), differentiate=False)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("temperature", "value"), [(1.0, 0.327813), (2.0, 0.443776)])
def test_field_case_b54_the_temperature_s_square_counts(temperature: float, value: float) -> None:
    """At T=2 the divergence is 0.110944; https://github.com/IntelLabs/distiller/issues/122 left the square out."""
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    found, _ = Divergence("forward_kl", temperature)(student, teacher, differentiate=False)
    assert found.item() == pytest.approx(value, abs=5e-7)
    if temperature == 2.0:
        assert found.item() / 4 == pytest.approx(0.110944, abs=5e-7)


def test_field_case_b54_the_gradient_s_size_does_not_depend_on_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(64, 100, generator=generator) * 0.1 for _ in range(2))

    def norm(temperature: float) -> float:
        return float(Divergence("forward_kl", temperature)(student, teacher, differentiate=True)[1].norm())

    assert [norm(t) / norm(1.0) for t in (2.0, 8.0, 64.0)] == pytest.approx([1.0] * 3, rel=0.02)


@dataclass
class Said:
    """A teacher whose scores are given."""

    scores: Tensor
    weight: float
    measure: Divergence

    def divergence(self, rows: slice, scores: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        teacher = self.scores[rows].float()
        return self.measure(scores[:, : teacher.shape[1]], teacher, differentiate=differentiate)


def make(dtype: torch.dtype = torch.float32, **options: float) -> HeadLoss:
    torch.manual_seed(0)
    head = HeadLoss([nn.LayerNorm(HIDDEN)], nn.Linear(HIDDEN, VOCABULARY), chunk_tokens=5, **options)  # type: ignore[arg-type]
    return head.to(dtype)


def sample() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (2, 21, hidden), targets of which a third is ignored, a teacher's scores of all 42 tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 21, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCABULARY, (2, 21), generator=generator)
    targets[:, :7] = IGNORED
    return hidden, targets, torch.randn(42, VOCABULARY, generator=generator) * 2


def whole(module: HeadLoss, hidden: Tensor, targets: Tensor, said: Said, denominator: float) -> Tensor:
    """The loss from whole logits, by plain torch."""
    scores = module.logits(hidden).flatten(0, 1)
    valid = targets.flatten() != IGNORED
    hard = nn.functional.cross_entropy(scores[valid], targets.flatten()[valid], reduction="sum")
    columns = scores[valid][:, : said.scores.shape[1]]
    soft = defined(said.measure, columns, said.scores[valid].to(scores.dtype)).sum()
    return ((1 - said.weight) * hard + said.weight * soft) / denominator


@pytest.mark.parametrize("columns", [VOCABULARY, 44])
@pytest.mark.parametrize("options", [{}, {"multiplier": 3.0, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("divergence", ALL, ids=str)
def test_in_chunks_as_from_whole_logits(divergence: Divergence, options: dict[str, float], columns: int) -> None:
    hidden, targets, scores = sample()
    module, exact = make(**options), make(torch.float64, **options)
    said = Said(scores[:, :columns], 0.7, divergence)
    one, other = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    loss, expected = module(one, targets, 37.0, said), whole(exact, other, targets, said, 37.0)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    pairs = [(one.grad, other.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(module.parameters(), exact.parameters(), strict=True)]
    for found, reference in pairs:
        assert (found.double() - reference).norm() <= 1e-5 * reference.norm()
    with torch.no_grad():
        assert torch.equal(module(hidden, targets, 37.0, said), loss)


def test_a_weight_of_zero_is_plain_training_and_of_one_plain_divergence() -> None:
    hidden, targets, scores = sample()
    module = make()

    def gradients(said: Said | None) -> list[Tensor]:
        module.zero_grad()
        loss = module(hidden, targets, 37.0, said)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]

    plain, none = gradients(None), gradients(Said(scores, 0.0, Divergence()))
    assert all(torch.equal(a, b) for a, b in zip(plain, none, strict=True))
    only = gradients(Said(scores, 1.0, Divergence()))
    valid = targets.flatten() != IGNORED
    logits = module.logits(hidden).flatten(0, 1)[valid]
    expected = nn.functional.kl_div(
        logits.log_softmax(-1), scores[valid].log_softmax(-1), log_target=True, reduction="sum"
    )
    assert only[0].item() == pytest.approx(expected.item() / 37.0, rel=1e-5)


@pytest.mark.parametrize("bad", [1e30, math.inf, math.nan])
def test_field_case_b54_padding_never_counts(bad: float) -> None:
    """One token counts, the other is padding: 0.327813, not 2.039453 or anything else; the gradient likewise."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    module = HeadLoss([], head)
    hidden = torch.tensor([[[0.0, 0.0], [3.0, -3.0]]], requires_grad=True)
    said = Said(torch.tensor([[2.0, 0.0], [bad, 0.0]]), 1.0, Divergence())
    loss = module(hidden, torch.tensor([[1, IGNORED]]), 1.0, said)
    loss.backward()
    assert loss.item() == pytest.approx(0.327813, abs=5e-7)
    assert torch.count_nonzero(hidden.grad[0, 1]) == 0
    assert torch.isfinite(head.weight.grad).all()
