import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from shardlab.model.randomness import StepRandom, mix, name_seed

INTEGERS = st.integers(-(2**63), 2**64 - 1)
ARGUMENTS = st.lists(INTEGERS, min_size=1, max_size=5)


@given(values=ARGUMENTS, index=st.integers(0, 4), other=INTEGERS)
def test_a_seed_changes_with_each_of_its_arguments(values: list[int], index: int, other: int) -> None:
    index %= len(values)
    changed = [*values[:index], other, *values[index + 1 :]]
    same = (other - values[index]) % 2**64 == 0
    assert (mix(*values) == mix(*changed)) == same
    assert 0 <= mix(*values) < 2**63


def test_small_arguments_give_distinct_seeds_whatever_their_places() -> None:
    seeds = {
        mix(seed, step, micro, segment)
        for seed in range(6)
        for step in range(6)
        for micro in range(6)
        for segment in range(6)
    }
    assert len(seeds) == 6**4


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    """A change here changes every run's weights and dropout: a resumed run would not be the same run."""
    assert mix(0) == 8147104208329303767
    assert mix(1, 2, 3) == 3851293329796251419
    assert name_seed(0, "model.norm.weight") == 7023439755689630092


def test_names_and_seeds_tell_tensors_apart() -> None:
    names = [f"model.layers.{i}.{kind}.weight" for i in range(50) for kind in ("q", "k", "v")]
    assert len({name_seed(seed, name) for name in names for seed in range(3)}) == 450


@pytest.mark.parametrize("changed", ["seed", "step", "micro_batch", "segment"])
def test_a_segment_s_numbers_depend_on_where_the_run_is_and_on_nothing_before(changed: str) -> None:
    place = {"seed": 1, "step": 2, "micro_batch": 3, "segment": 4}

    def draw(seed: int, step: int, micro_batch: int, segment: int) -> torch.Tensor:
        torch.rand(17)  # whatever came before
        StepRandom(seed, step, micro_batch).enter(segment)
        return torch.rand(5)

    assert torch.equal(draw(**place), draw(**place))
    assert not torch.equal(draw(**place), draw(**{**place, changed: 9}))
