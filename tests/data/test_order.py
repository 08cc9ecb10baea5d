import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.order import permutation, rows_at

SEEDS = st.integers(-(2**63), 2**64 - 1)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000])
def test_every_row_comes_once(length):
    assert sorted(permutation(np.arange(length), length, seed=3, epoch=2)) == list(range(length))


@given(length=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_it_is_a_bijection_for_any_length_seed_and_epoch(length, seed, epoch):
    assert np.array_equal(np.sort(permutation(np.arange(length), length, seed, epoch)), np.arange(length))


@given(length=st.integers(1, 10**12), seed=SEEDS, data=st.data())
def test_a_position_does_not_depend_on_the_others_asked_for(length, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8)))
    rows = permutation(positions, length, seed)
    assert ((rows >= 0) & (rows < length)).all()
    assert [int(permutation(np.array([position]), length, seed)[0]) for position in positions] == rows.tolist()


def test_each_epoch_and_seed_has_its_own_order():
    orders = {tuple(permutation(np.arange(50), 50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("length", [3, 5, 12])
def test_every_row_is_as_likely_at_every_position(length):
    """Chi-square over 4000 epochs, against the mean plus five standard deviations of its distribution."""
    epochs = 4000
    positions = np.arange(epochs * length)
    counts = np.zeros((length, length))
    np.add.at(counts, (positions % length, rows_at(positions, length, seed=1)), 1)
    statistic = ((counts - epochs / length) ** 2 / (epochs / length)).sum()
    freedom = (length - 1) ** 2
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_do_not_stay_together():
    order = permutation(np.arange(10_000), 10_000, seed=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_positions_run_through_the_epochs():
    rows = rows_at(np.arange(7 * 4), length=7, seed=9)
    for epoch in range(4):
        expected = permutation(np.arange(7), 7, seed=9, epoch=epoch)
        assert np.array_equal(rows[epoch * 7 : epoch * 7 + 7], expected)


def test_a_position_outside_is_refused():
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
        permutation(np.array([5]), 5, seed=0)
