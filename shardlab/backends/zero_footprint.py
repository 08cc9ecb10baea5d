"""What `ZeROBackend.prepare` and a step of it allocate: DeepSpeed 0.19 with the config of `zero_config`.

Stages 1 and 2 keep the weights whole in a flat buffer for each optimizer group, and the rank's part of masters and
moments. Stage 3 keeps a part of the weights too, gathers module by module, and adds gradients up in a buffer of its
own that is always there. In fp32 the masters are a second copy of the rank's part of the weights.
"""

from collections.abc import Iterator

from shardlab.backends.placement import (
    BF16,
    FP32,
    Setting,
    largest,
    moment,
    span_name,
    spans,
    trained,
    update_temporaries,
)
from shardlab.backends.zero_config import PERSISTENCE_THRESHOLD, bucket_elements
from shardlab.plan import ROOT, Bytes, Kind, Moment, Span


def footprint(setting: Setting) -> Iterator[Moment]:
    """See the module."""
    stage = int(setting.plan.backend[-1])
    if stage == 3:
        yield from _Stage3(setting).moments()
    else:
        yield from _whole_weights(setting, stage)


def _whole_weights(setting: Setting, stage: int) -> Iterator[Moment]:
    world, size = setting.plan.world_size, setting.compute_size
    trainable = setting.model.numel(trainable=True)
    flat = -(-trainable // (2 * world)) * 2 * world
    part = flat // world
    frozen = setting.model.numel(trainable=False)
    resident: dict[Kind, int] = {"parameters": (flat + frozen) * size}
    state: dict[Kind, int] = {"masters": part * FP32, "moments": part * FP32 * setting.states}
    offload = setting.plan.offload.optimizer == "cpu"
    if offload:
        big = largest(trained(setting.model.parameters)) * size
        state |= {"gradients": part * FP32, "temporaries": part * size + big}
        resident["temporaries"] = big
    host: Bytes = state if setting.accelerator and offload else {}
    if not host:
        resident = {kind: resident.get(kind, 0) + state.get(kind, 0) for kind in {**resident, **state}}
    bucket = bucket_elements(setting.model.numel()) * FP32
    in_place = stage == 1 and size == BF16
    if in_place:
        resident["gradients"] = resident.get("gradients", 0) + flat * FP32
        yield from spans(setting, resident, host)
    elif stage == 1:
        yield from _stage_1(setting, resident, host)
        # The rank's part of them is copied into a tensor of its own; on a CPU its pages come as those copied from go.
        copied = part * FP32 if setting.accelerator and not offload else 0
        after: Bytes = {"communication": bucket, "gradients": trainable * FP32 + copied}
        yield moment("reduction of the gradients", resident, after, host=host)
    else:
        resident["communication"] = bucket
        yield from _stage_2(setting, resident, part, host)
    resident = {kind: bytes_ for kind, bytes_ in resident.items() if kind != "communication"}
    # The rank's gradients are copied into one tensor.
    yield moment("update", resident, {"gradients": 0 if offload or in_place else 2 * part * FP32}, host=host)
    passing = _update(setting, part, largest(trained(setting.model.parameters)))
    held: Bytes = {"gradients": 0 if offload or in_place else part * FP32, "temporaries": passing}
    yield moment("the first update", resident, held, host=host)


def _update(setting: Setting, part: int, biggest: int) -> int:
    """What the update of a rank's `part` passes through: it is one flat tensor; the check of ours goes by tensors."""
    if setting.loop == "shardlab":
        return update_temporaries(setting, part, min(part, biggest))
    moved = setting.accelerator and setting.plan.offload.optimizer == "cpu"
    return 0 if moved else update_temporaries(setting, part, part)


def _stage_1(setting: Setting, resident: Bytes, host: Bytes) -> Iterator[Moment]:
    """In fp32 autograd keeps every gradient, until the window's last backward pass has ended."""
    model = setting.model
    whole, kept = model.numel(trainable=True) * FP32, 0
    for span in setting.timeline:
        own: Bytes = {"gradients": whole if setting.plan.accumulation > 1 else kept}
        yield moment(span_name(span, model), resident, own, span.peak, host=host)
        if span.phase == "backward":
            units = (span.segment,) if span.segment else (ROOT, model.embedding)
            kept += sum(p.numel for unit in units for p in trained(model.unit(unit))) * FP32


def _stage_2(setting: Setting, resident: Bytes, part: int, host: Bytes) -> Iterator[Moment]:
    """The tensor of the rank's gradients is there from the backward pass's first bucket on.

    On a CPU its pages are as they are written, and the last rank's are first: the head is there.
    """
    offload = setting.plan.offload.optimizer == "cpu"
    model, written = setting.model, 0
    for span in setting.timeline:
        own: Bytes = {}
        if not offload:
            new = part * FP32 if setting.accelerator else min(part, written) * FP32
            before = part * FP32 if setting.plan.accumulation > 1 else 0
            own = {"gradients": before + (new if span.phase == "backward" else 0)}
        yield moment(span_name(span, model), resident, own, span.peak, host=host)
        if span.phase == "backward":
            units = (span.segment,) if span.segment else (ROOT, model.embedding)
            written += sum(p.numel for unit in units for p in trained(model.unit(unit)))


class _Stage3:
    def __init__(self, setting: Setting):
        self._setting = setting
        self._world = setting.plan.world_size
        self._size = setting.compute_size
        self._bucket = bucket_elements(setting.model.numel())

    def moments(self) -> Iterator[Moment]:
        setting, model, world = self._setting, self._setting.model, self._world
        parts = sum(-(-p.numel // world) for p in model.parameters)
        trainable = sum(-(-p.numel // world) for p in trained(model.parameters))
        weights: dict[Kind, int] = {"parameters": parts * self._size}
        state: dict[Kind, int] = {
            "masters": trainable * FP32,
            "moments": trainable * FP32 * setting.states,
            "gradients": trainable * FP32,
        }
        if setting.plan.offload.optimizer == "cpu":
            state["gradients"] *= 2  # added up on the device, then handed to the optimizer on the host
        small = sum(p.numel for p in model.parameters if p.numel < PERSISTENCE_THRESHOLD)
        resident: dict[Kind, int] = {"communication": small * self._size + self._bucket * FP32}
        host: dict[Kind, int] = {}
        for what, place in ((weights, setting.plan.offload.parameters), (state, setting.plan.offload.optimizer)):
            (host if setting.accelerator and place == "cpu" else resident).update(what)
        for span in setting.timeline:
            own: Bytes = {"communication": self._gathered(span)}
            yield moment(span_name(span, model), resident, own, span.peak, host=host)
        passing = _update(setting, trainable, -(-largest(trained(model.parameters)) // world))
        yield moment("the first update", resident, {"temporaries": passing}, host=host)

    def _gathered(self, span: Span) -> int:
        """The segment's parameters up to the limit of live ones, and one more bucket on its way."""
        model = self._setting.model
        units = (span.segment,) if span.segment else (0, model.embedding)
        sizes = [p.numel for unit in units for p in model.unit(unit) if p.numel >= PERSISTENCE_THRESHOLD]
        limit = largest(model.parameters) + self._bucket
        # A tied head and embedding are gathered from the head's forward pass to the embedding's backward pass.
        tied = 0 if model.unit(model.tail) else largest(model.unit(ROOT))
        return (min(sum(sizes), limit) + tied + (self._bucket if self._world > 1 else 0)) * self._size
