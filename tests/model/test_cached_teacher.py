"""A teacher's likeliest tokens and the share of the rest: values and gradients against float64 by definition."""

import pytest
import torch
from torch import Tensor, nn

from shardlab.backends.stream.taught import RowwiseTargets
from shardlab.backends.stream.vocabulary import RowwiseLoss
from shardlab.data.window import IGNORED, TAUGHT_IDS, TAUGHT_REST, TAUGHT_SHARES
from shardlab.model.cached_teacher import CachedTargets, CachedTeacher, likeliest
from shardlab.model.divergence import Divergence
from shardlab.model.head import HeadLoss

HIDDEN, VOCABULARY, TOKENS, KEPT = 16, 50, 42, 6
MEASURES = [Divergence(name, t, 0.3) for name in ("forward_kl", "skew_kl") for t in (1.0, 2.5)]  # type: ignore[arg-type]


class Source:
    """What `CachedTeacher` takes of a teacher in memory."""

    def __init__(self, measure: Divergence, weight: float, columns: int):
        self.measure, self.weight, self.columns = measure, weight, columns


def said_of(scores: Tensor, measure: Divergence, weight: float, kept: int, columns: int = VOCABULARY) -> CachedTargets:
    """What a cache gives back of a teacher's scores (tokens, vocabulary)."""
    ids, shares, rest = likeliest(scores[:, :columns], kept, measure.temperature)
    teacher = CachedTeacher(Source(measure, weight, columns), kept)  # type: ignore[arg-type]
    batch = {
        TAUGHT_IDS: ids.int()[None],
        TAUGHT_SHARES: shares.half().clamp_min(-1e4).view(torch.int16)[None],
        TAUGHT_REST: rest.float().clamp_min(-1e4).view(torch.int32)[None],
    }
    return teacher.look(batch)


def defined(said: CachedTargets, scores: Tensor) -> Tensor:
    """T² x KL of each row over k tokens and the rest, by probabilities in float64; `scores` are the student's."""
    measure, columns = said.source.measure, said.source.columns
    q = torch.softmax(scores[:, :columns] / measure.temperature, 1)
    top = q.gather(1, said.ids.long())
    q = torch.cat([top, 1 - top.sum(1, keepdim=True)], 1)
    p = torch.cat([said.shares.view(torch.float16).double(), said.rest.view(torch.float32).double()[:, None]], 1).exp()
    p = p / p.sum(1, keepdim=True)
    other = q if measure.name == "forward_kl" else measure.mixture * p + (1 - measure.mixture) * q
    return (p * (p.log() - other.log())).sum(1) * measure.temperature**2


def scores_of(seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def test_likeliest_tokens_and_the_rest() -> None:
    scores = scores_of(0)
    ids, shares, rest = likeliest(scores.float(), KEPT, 2.0)
    exact = torch.softmax(scores / 2, 1)
    expected, order = exact.sort(1, descending=True)
    assert torch.equal(ids, order[:, :KEPT])
    torch.testing.assert_close(shares.exp().double(), expected[:, :KEPT], rtol=1e-5, atol=0)
    torch.testing.assert_close(rest.exp().double(), expected[:, KEPT:].sum(1), rtol=1e-5, atol=0)


def test_a_rest_of_little_keeps_its_digits() -> None:
    """As 1 less the others it would be 0, or noise, in fp32."""
    scores = torch.zeros(1, VOCABULARY)
    scores[0, 3] = 40.0
    rest = likeliest(scores, 1, 1.0)[2]
    assert rest.item() == pytest.approx(torch.tensor(VOCABULARY - 1.0).log().item() - 40, rel=1e-6)


@pytest.mark.parametrize("columns", [VOCABULARY, 44])
@pytest.mark.parametrize("measure", MEASURES, ids=str)
def test_value_and_gradient(measure: Divergence, columns: int) -> None:
    said = said_of(scores_of(0), measure, 1.0, KEPT, columns)
    student = scores_of(1).requires_grad_()
    expected = defined(said, student)
    expected.sum().backward()
    assert student.grad is not None
    before = student.detach().float()
    value, gradient = said.divergence(slice(0, TOKENS), before, differentiate=True)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-6)
    assert gradient is not None
    assert gradient.shape == (TOKENS, columns)
    torch.testing.assert_close(gradient.double(), student.grad[:, :columns], rtol=1e-4, atol=1e-6)
    assert torch.equal(before, student.detach().float())
    alone, nothing = said.divergence(slice(3, 9), before[3:9], differentiate=False)
    torch.testing.assert_close(alone, value[3:9])
    assert nothing is None


@pytest.mark.parametrize("measure", MEASURES, ids=str)
def test_with_every_token_kept_it_is_the_whole_divergence(measure: Divergence) -> None:
    """But for the cache's fp16. With fewer it is never more."""
    teacher, student = scores_of(0), scores_of(1).float()
    whole, slope = measure(student, teacher.float(), differentiate=True)
    value, gradient = said_of(teacher, measure, 1.0, VOCABULARY).divergence(
        slice(0, TOKENS), student, differentiate=True
    )
    torch.testing.assert_close(value, whole, rtol=5e-3, atol=1e-3)
    assert (gradient - slope).norm() <= 2e-3 * slope.norm()
    for kept in (1, 4, 16):
        fewer, _ = said_of(teacher, measure, 1.0, kept).divergence(slice(0, TOKENS), student, differentiate=False)
        assert (fewer <= whole + 1e-2).all()
        assert fewer.sum() < whole.sum()


def test_scores_far_apart_stay_finite_and_a_nan_shows() -> None:
    teacher, student = torch.tensor([[300.0, 0.0, -300.0]]), torch.tensor([[0.0, 300.0, 0.0]])
    said = said_of(teacher, Divergence(), 1.0, 2)
    value, gradient = said.divergence(slice(0, 1), student, differentiate=True)
    assert value.item() == pytest.approx(300.0, rel=1e-3)
    assert torch.isfinite(gradient).all()
    student[0, 2] = torch.nan
    assert said.divergence(slice(0, 1), student, differentiate=False)[0].isnan().all()


@pytest.mark.parametrize("options", [{}, {"multiplier": 3.0, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("measure", MEASURES, ids=str)
def test_in_chunks_and_by_rows_as_from_whole_logits(measure: Divergence, options: dict[str, float]) -> None:
    """`HeadLoss` takes chunks of tokens, backend stream ranges of the head's rows too; two micro-batches."""
    torch.manual_seed(0)
    head = HeadLoss([], nn.Linear(HIDDEN, VOCABULARY), chunk_tokens=5, **options)  # type: ignore[arg-type]
    exact = HeadLoss([], nn.Linear(HIDDEN, VOCABULARY), **options).double()  # type: ignore[arg-type]
    exact.load_state_dict(head.state_dict())
    hidden = torch.randn(2, TOKENS // 2, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (2, TOKENS // 2))
    targets[:, :7] = IGNORED
    columns, weight, denominator = 44, 0.7, 37.0
    said = said_of(scores_of(0), measure, weight, KEPT, columns)
    whole_hidden = hidden.double().requires_grad_()
    scores, valid = exact.logits(whole_hidden).flatten(0, 1), targets.flatten() != IGNORED
    hard = nn.functional.cross_entropy(scores[valid], targets.flatten()[valid], reduction="sum")
    expected = ((1 - weight) * hard + weight * defined(said, scores)[valid].sum()) / denominator
    expected.backward()
    references = [whole_hidden.grad, exact.head.weight.grad, exact.head.bias.grad]

    def close(found: Tensor, reference: Tensor | None) -> None:
        assert reference is not None
        assert (found.double() - reference).norm() <= 1e-4 * reference.norm()

    one = hidden.clone().requires_grad_()
    loss = head(one, targets, denominator, said)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, reference in zip([one.grad, head.head.weight.grad, head.head.bias.grad], references, strict=True):
        close(found, reference)

    halves = [
        CachedTargets(said.source, *(p[s] for p in (said.ids, said.shares, said.rest)))
        for s in (slice(0, TOKENS // 2), slice(TOKENS // 2, None))
    ]
    rowwise = RowwiseLoss(head, hidden.flatten(0, 1), targets.flatten(), RowwiseTargets(halves, hidden.device))
    ranges = [slice(0, 20), slice(20, 44), slice(44, 47), slice(47, VOCABULARY)]
    weights, bias = torch.zeros_like(head.head.weight), torch.zeros(VOCABULARY)
    with torch.no_grad():
        for rows in ranges:
            rowwise.see(rows, head.head.weight[rows])
        assert float(rowwise.total()) / denominator == pytest.approx(expected.item(), rel=1e-5)
        for rows in reversed(ranges):
            rowwise.differentiate(rows, head.head.weight[rows], denominator, weights[rows], bias[rows])
    assert rowwise.gradient is not None
    for found, reference in zip([rowwise.gradient.view_as(hidden), weights, bias], references, strict=True):
        close(found, reference)
