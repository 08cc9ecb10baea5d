"""Places of buffers in shared memory: what follows lies apart from what may still be read, or says that it doesn't."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.backends.slots import ALIGNMENT, Slots, capacity, read_from_peer


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_a_buffer_that_overlaps_the_one_before_says_so(sizes: list[int]) -> None:
    slots, before = Slots(capacity([], sizes)), range(0)
    for size in sizes:
        offset, overlaps = slots.place(size)
        assert offset % ALIGNMENT == 0
        assert offset + size <= slots.size
        assert overlaps == bool(set(range(offset, offset + size)) & set(before))
        before = range(offset, offset + size)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(1, 20000))
def test_two_blocks_always_fit_beside_each_other(blocks: list[int], head: int) -> None:
    slots = Slots(capacity(blocks, [head]))
    for size in [*blocks, *reversed(blocks)] * 2:
        assert not slots.place(size)[1]


def test_a_buffer_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="4097"):
        Slots(4096).place(4097)


@given(st.lists(st.integers(1, 50).map(lambda n: n * 12), min_size=1, max_size=8), st.integers(2, 4))
def test_what_is_read_of_a_peer_is_counted_once(order: list[int], ranks: int) -> None:
    piece = capacity([], order)
    read = []
    for rank in range(ranks):
        slots, seen = Slots(piece), set[int]()
        for size in order * 2:
            offset, _ = slots.place(size)
            seen |= set(range(offset + rank * size // ranks, offset + (rank + 1) * size // ranks))
        read.append(len(seen))
    assert read_from_peer(order, piece, ranks) == max(read)
