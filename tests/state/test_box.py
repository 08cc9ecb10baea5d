"""Boxes against index arithmetic done by torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.state.box import Box, boxes_of_range, whole

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    size = math.prod(shape)
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


@given(ranges())
def test_the_boxes_of_a_flat_range_are_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    assert torch.cat([torch.empty(0), *(numbered[box.slices].flatten() for box in boxes)]).tolist() == list(
        range(start, stop)
    )
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))

    def one() -> Box:
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        return Box(offsets, tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True)))

    return shape, one(), one()


@given(box_pairs())
def test_an_intersection_is_what_both_cover(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, first, second = case
    covered = torch.zeros(shape, dtype=torch.int64)
    covered[first.slices] += 1
    covered[second.slices] += 1
    both = first.intersection(second)
    assert int((covered == 2).sum()) == (both.numel if both is not None else 0)
    if both is not None:
        assert bool((covered[both.slices] == 2).all())
        numbered = torch.arange(math.prod(shape)).reshape(shape)
        assert torch.equal(numbered[first.slices][both.within(first).slices], numbered[both.slices])


def test_the_whole_of_a_tensor() -> None:
    assert whole((3, 2)) == Box((0, 0), (3, 2))
    assert whole(()) == Box((), ())
    assert whole((0, 4)) is None
    assert Box((1, 0), (2, 2)).fits((3, 2))
    assert not Box((2, 0), (2, 2)).fits((3, 2))


@pytest.mark.parametrize(("offsets", "lengths"), [((0,), (0,)), ((-1,), (1,)), ((0, 0), (1,))])
def test_a_box_without_elements_is_none(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a box"):
        Box(offsets, lengths)


def test_a_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="range"):
        boxes_of_range((2, 2), 3, 5)
