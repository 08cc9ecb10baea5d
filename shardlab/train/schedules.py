"""The learning rate as a pure function of the number of updates applied so far.

There is no scheduler object to be stepped: on N ranks, under accumulation, and after a resume the rate is the same.
"""

import math

from shardlab.recipe import ConstantSchedule, CosineSchedule, LinearSchedule

Schedule = CosineSchedule | LinearSchedule | ConstantSchedule


def learning_rate(schedule: Schedule, *, peak: float, applied: int, steps: int) -> float:
    """The rate of the update that follows `applied` updates, in a run of `steps`.

    Warm-up rises linearly and reaches `peak` with its last step; the decay begins with the step after it and reaches
    `final_fraction * peak` with the run's last step.
    """
    warmup = schedule.warmup_steps
    if applied < warmup:
        return peak * (applied + 1) / warmup
    if isinstance(schedule, ConstantSchedule):
        return peak
    progress = min(1.0, (applied - warmup) / max(1, steps - 1 - warmup))
    left = 1 - progress if isinstance(schedule, LinearSchedule) else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * left)
