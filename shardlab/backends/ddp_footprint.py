"""What `DDPBackend.prepare` and a step of it allocate."""

from collections.abc import Iterator

from shardlab.backends.placement import BF16, FP32, INT64, Setting, largest, moment, spans, trained
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
    # The first update is checked: each tensor's bits are summed as 64-bit integers.
    check = largest(trained(setting.model.parameters)) * INT64
    yield moment("the first update", resident, {"temporaries": check})
