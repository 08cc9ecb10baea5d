"""What a plain loop allocates without sharding: one process, or torch's DistributedDataParallel.

Gradients are made by each backward pass, in the weights' own precision, and stay until the optimizer has read them.
DistributedDataParallel has a second copy of them all, its buckets; gloo reduces a copy of one of those.
"""

from collections.abc import Iterator

from shardlab.backends.placement import Setting, largest, moment, span_name, trained, update_temporaries
from shardlab.plan import ROOT, Bytes, Kind, Moment

BUCKET_BYTES = 25 * 1024**2  # DistributedDataParallel's default


def footprint(setting: Setting) -> Iterator[Moment]:
    """See the module. The timeline is of gradients that go with their unit: here they stay."""
    model, size = setting.model, setting.compute_size
    trainable = model.numel(trainable=True)
    resident: dict[Kind, int] = {
        "parameters": model.numel() * size,
        "moments": trainable * size * setting.states,
    }
    if setting.plan.world_size > 1:
        copied = 0 if setting.accelerator else min(BUCKET_BYTES, trainable * size)
        resident["communication"] = trainable * size + copied
    kept, before = kept_output(setting), 0
    collects = setting.plan.accumulation > 1
    for span in setting.timeline:
        own: Bytes = {"gradients": trainable * size if collects else before}
        parts = (resident, own, span.peak) if span.phase == "backward" else (resident, own, span.peak, kept)
        yield moment(span_name(span, model), *parts)
        if span.phase == "backward":
            units = (span.segment,) if span.segment else (ROOT, model.embedding)
            before += sum(p.numel for unit in units for p in trained(model.unit(unit))) * size
    temporaries = update_temporaries(setting, trainable, largest(trained(model.parameters)), size)
    yield moment("update", resident, kept, {"gradients": trainable * size, "temporaries": temporaries})


def kept_output(setting: Setting) -> Bytes:
    """What a plain loop's variable holds of the micro-batch before: logits, keys and values."""
    if setting.loop == "shardlab" or not setting.timeline:
        return {}
    return {kind: size for kind, size in setting.timeline[-1].exit.items() if kind != "gradients"}
