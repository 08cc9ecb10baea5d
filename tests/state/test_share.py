"""Sharing out what ranks hold alike, and live state as fragments, against tensors that count."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.state.box import Box, boxes_of_range, whole
from shardlab.state.fragment import MASTER
from shardlab.state.held import Held, fragments_of, held_range
from shardlab.state.share import shares

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_shares_are_even_and_cover_each_element_once(sizes: list[int], ranks: int) -> None:
    written = [[0] * size for size in sizes]
    totals = []
    for rank in range(ranks):
        ranges = shares(sizes, rank, ranks)
        assert len(ranges) == len(sizes)
        for times, (start, stop) in zip(written, ranges, strict=True):
            assert 0 <= start <= stop <= len(times)
            times[start:stop] = [n + 1 for n in times[start:stop]]
        totals.append(sum(stop - start for start, stop in ranges))
    assert all(n == 1 for times in written for n in times)
    assert max(totals) - min(totals) <= 1


def test_a_rank_that_is_not_there_has_no_share() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        shares([3], 2, 2)


@given(SHAPES, st.integers(1, 5))
def test_replicas_write_each_element_once_and_without_a_copy(shapes: list[tuple[int, ...]], ranks: int) -> None:
    tensors = [
        torch.arange(math.prod(shape)).reshape(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
        for shape in shapes
    ]
    held = [
        Held(str(i), shape, whole(shape), {MASTER: tensor})  # type: ignore[arg-type]
        for i, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True))
    ]
    written = [torch.full(shape, -1) for shape in shapes]
    for rank in range(ranks):
        for fragment in fragments_of(held, rank, ranks):
            place: Tensor = written[int(fragment.name)][fragment.box.slices]
            assert bool((place == -1).all())
            place.copy_(fragment.data)
            assert (
                fragment.data.untyped_storage().data_ptr() == tensors[int(fragment.name)].untyped_storage().data_ptr()
            )
    for tensor, copy in zip(tensors, written, strict=True):
        assert torch.equal(tensor, copy)


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.data())
def test_a_flat_range_is_held_as_views_of_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    flat = torch.arange(start, data.draw(st.integers(start, size)))
    numbered = torch.arange(size).reshape(shape)
    held = list(held_range("w", shape, start, {MASTER: flat}))
    assert [one.box for one in held] == boxes_of_range(shape, start, start + len(flat))
    for one in held:
        assert torch.equal(one.states[MASTER], numbered[one.box.slices])
        one.states[MASTER].fill_(-1)
    assert bool((flat == -1).all())


def test_a_shard_s_fragments_lie_where_the_shard_does() -> None:
    held = [Held("w", (6, 2), Box((4, 0), (2, 2)), {MASTER: torch.arange(4).reshape(2, 2)})]
    first, second = (list(fragments_of(held, rank, 2)) for rank in range(2))
    assert [fragment.box for fragment in (*first, *second)] == [Box((4, 0), (1, 2)), Box((5, 0), (1, 2))]
