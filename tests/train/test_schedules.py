"""The learning rate: a pure function of the number of updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.recipe import ConstantSchedule, CosineSchedule, LinearSchedule
from shardlab.train.schedules import Schedule, learning_rate


def rates(schedule: Schedule, steps: int, peak: float = 1.0) -> list[float]:
    return [learning_rate(schedule, peak=peak, applied=applied, steps=steps) for applied in range(steps)]


def test_linear_decay_by_hand() -> None:
    """https://github.com/huggingface/accelerate/issues/2142: on two ranks the rate was 0.8 after one step, then 0.6."""
    schedule = LinearSchedule(name="linear", warmup_steps=0)
    assert rates(schedule, 11) == pytest.approx([1 - k / 10 for k in range(11)])


def test_cosine_by_hand() -> None:
    schedule = CosineSchedule(warmup_steps=0, final_fraction=0.2)
    assert rates(schedule, 5, peak=10.0) == pytest.approx([10.0, 8.82842712, 6.0, 3.17157288, 2.0])


def test_constant_stays_at_the_peak() -> None:
    assert rates(ConstantSchedule(name="constant", warmup_steps=2), 5, peak=3.0) == [1.5, 3.0, 3.0, 3.0, 3.0]


DECAYING = [CosineSchedule(warmup_steps=4, final_fraction=0.1), LinearSchedule(name="linear", warmup_steps=4)]


@pytest.mark.parametrize("schedule", DECAYING)
def test_warm_up_then_decay(schedule: CosineSchedule | LinearSchedule) -> None:
    rising_and_falling = rates(schedule, 20)
    assert rising_and_falling[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rising_and_falling[4:] == sorted(rising_and_falling[4:], reverse=True)
    assert rising_and_falling[-1] == pytest.approx(schedule.final_fraction)


@pytest.mark.parametrize("schedule", DECAYING)
def test_a_run_shorter_than_its_warm_up_only_rises(schedule: Schedule) -> None:
    assert rates(schedule, 3) == [0.25, 0.5, 0.75]


@given(
    warmup=st.integers(0, 30),
    steps=st.integers(1, 60),
    applied=st.integers(0, 100),
    fraction=st.floats(0, 1),
    linear=st.booleans(),
)
def test_the_rate_is_never_outside_its_bounds(
    warmup: int, steps: int, applied: int, fraction: float, linear: bool
) -> None:
    """Also past the last step, where a user's own loader is longer than the recipe says."""
    schedule: Schedule = (
        LinearSchedule(name="linear", warmup_steps=warmup, final_fraction=fraction)
        if linear
        else CosineSchedule(warmup_steps=warmup, final_fraction=fraction)
    )
    rate = learning_rate(schedule, peak=2.0, applied=applied, steps=steps)
    lowest = 2.0 / warmup if applied < warmup else 2.0 * fraction
    assert lowest - 1e-12 <= rate <= 2.0 + 1e-12
    assert rate == learning_rate(schedule, peak=2.0, applied=applied, steps=steps)
