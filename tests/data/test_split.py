import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.split import Part, split
from shardlab.errors import UserError


def _positions(part: Part) -> list[int]:
    return [position for start, end in part.spans for position in range(start, end)]


@given(st.lists(st.integers(2, 50), min_size=1, max_size=60), st.floats(0.001, 0.999))
def test_each_token_is_on_one_side_and_neither_is_empty(lengths, fraction):
    train, held = split(np.array(lengths), fraction) if sum(lengths) >= 4 else (None, None)
    if train is None or held is None:
        return
    assert sorted(_positions(train) + _positions(held)) == list(range(sum(lengths)))
    assert min(train.tokens, held.tokens) >= 2
    assert min(*train.lengths, *held.lengths) > 0


@given(st.lists(st.integers(2, 50), min_size=20, max_size=60), st.floats(0.001, 0.999))
def test_with_enough_documents_none_is_cut(lengths, fraction):
    train, held = split(np.array(lengths), fraction)
    assert held is not None
    assert sorted([*train.lengths, *held.lengths]) == sorted(lengths)
    assert held.tokens <= max(fraction * sum(lengths), min(lengths))


def test_about_the_fraction_of_the_tokens_is_held_out():
    lengths = np.random.default_rng(0).lognormal(7, 1.5, size=700).astype(np.int64) + 2
    _, held = split(lengths, 0.02)
    assert held is not None
    assert held.tokens / lengths.sum() == pytest.approx(0.02, rel=0.02)
    assert len(held.lengths) > 3


def test_few_documents_give_the_end_of_the_stream():
    train, held = split(np.array([30, 50, 20]), 0.4)
    assert held is not None
    assert (train.spans.tolist(), train.lengths.tolist()) == ([[0, 60]], [30, 30])
    assert (held.spans.tolist(), held.lengths.tolist()) == ([[60, 100]], [20, 20])


def test_a_cut_at_a_document_end_makes_no_empty_document():
    train, held = split(np.array([60, 40]), 0.4)
    assert held is not None
    assert (train.lengths.tolist(), held.lengths.tolist()) == ([60], [40])


def test_fraction_zero_holds_nothing_out():
    train, held = split(np.array([5, 6]), 0.0)
    assert held is None
    assert (train.spans.tolist(), train.lengths.tolist()) == ([[0, 11]], [5, 6])


def test_a_text_too_short_for_two_sides_is_refused():
    with pytest.raises(UserError, match=r"evaluation_fraction: 3 tokens are too few"):
        split(np.array([3]), 0.1)
