"""What `DDPBackend.prepare` and a step of it allocate."""

from collections.abc import Iterator

from shardlab.backends.placement import BF16, FP32, Setting, largest, moment, spans, trained, update_temporaries
from shardlab.plan import Kind, Moment

GRADIENTS = "buffers"


def footprint(setting: Setting) -> Iterator[Moment]:
    """Weights (and, in bf16, masters), gradient buckets and moments, whole on every rank."""
    everything, trainable = setting.model.numel(), setting.model.numel(trainable=True)
    resident: dict[Kind, int] = {
        "parameters": everything * setting.compute_size,
        "gradients": trainable * FP32,
        "moments": trainable * FP32 * setting.states,
    }
    if setting.compute_size == BF16:
        resident["masters"] = trainable * FP32
    yield from spans(setting, resident)
    passing = update_temporaries(setting, trainable, largest(trained(setting.model.parameters)))
    yield moment("the first update", resident, {"temporaries": passing})
