"""What `DDPBackend.prepare` and a step of it allocate."""

from collections.abc import Iterator

from shardlab.backends.placement import (
    BF16,
    FP32,
    Setting,
    Standing,
    largest,
    moment,
    spans,
    stored,
    trained,
    update_temporaries,
)
from shardlab.plan import Kind, Moment

GRADIENTS = "buffers"


def footprint(setting: Setting) -> Iterator[Moment]:
    """What stands between steps, and what a step adds."""
    resident = standing(setting).resident
    trainable = setting.model.numel(trainable=True)
    yield from spans(setting, resident)
    passing = update_temporaries(setting, trainable, largest(trained(setting.model.parameters)))
    yield moment("the first update", resident, {"temporaries": passing})


def standing(setting: Setting) -> Standing:
    """Weights (and, in bf16, masters), gradient buckets and moments, whole on every rank.

    Ranks share a checkpoint out. On a CPU what is written at the end is read from where it is.
    """
    everything, trainable = setting.model.numel(), setting.model.numel(trainable=True)
    resident: dict[Kind, int] = {
        "parameters": everything * setting.compute_size,
        "gradients": trainable * FP32,
        "moments": trainable * FP32 * setting.states,
    }
    if setting.compute_size == BF16:
        resident["masters"] = trainable * FP32
    return Standing(
        resident=resident,
        host={},
        building=sum(resident.values()) - resident["moments"],
        saved=-(-stored(setting, setting.compute_size) // setting.plan.world_size),
        copied=setting.accelerator,
        passing=0,
    )
