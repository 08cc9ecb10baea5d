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
    Standing,
    largest,
    moment,
    pinned,
    span_name,
    spans,
    stored,
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


def standing(setting: Setting) -> Standing:
    """Outside of steps; every tensor that is written at the end is a copy."""
    model, size, world = setting.model, setting.compute_size, setting.plan.world_size
    biggest = largest(model.parameters)
    if setting.plan.backend == "zero3":
        resident, host = _Stage3(setting).resident()
        made = max(sum(p.numel for p in model.unit(unit)) for unit in range(model.embedding + 1)) * size
        each = FP32 * (1 + setting.states)
        saved = sum(-(-p.numel // world) * (each if p.trainable else size) for p in model.parameters)
        # A unit is whole while it is partitioned; of the next one a tensor has just been made in fp32.
        building = max(resident.get("parameters", 0) + made + biggest * FP32, _made_at_once(resident))
        return Standing(resident, host, building, saved, copied=True, passing=biggest * size)
    resident, host = _stands(setting, int(setting.plan.backend[-1]))
    trainable, everything = model.numel(trainable=True), model.numel()
    # What is trained is made in fp32, then cast; its flat copy is made while it is there.
    whole = max(trainable * FP32 + (everything - trainable) * size, (everything + trainable) * size)
    building = max(whole, _made_at_once(resident))
    saved = -(-stored(setting, size) // world)
    return Standing(resident, host, building, saved, copied=True, passing=0)


def _made_at_once(resident: Bytes) -> int:
    """What `deepspeed.initialize` leaves: all but the moments, which come with the first update."""
    return sum(size for kind, size in resident.items() if kind != "moments")


def _flat(setting: Setting) -> int:
    """Elements of what is trained, padded for the ranks to share."""
    unit = 2 * setting.plan.world_size
    return -(-setting.model.numel(trainable=True) // unit) * unit


def _stands(setting: Setting, stage: int) -> tuple[dict[Kind, int], dict[Kind, int]]:
    """Of stages 1 and 2 between two steps: in the memory that computes, and on the host."""
    size, flat = setting.compute_size, _flat(setting)
    part = flat // setting.plan.world_size
    resident: dict[Kind, int] = {"parameters": (flat + setting.model.numel(trainable=False)) * size}
    state: dict[Kind, int] = {"masters": part * FP32, "moments": part * FP32 * setting.states}
    offload = setting.plan.offload.optimizer == "cpu"
    if offload:
        big = largest(trained(setting.model.parameters)) * size
        state |= {"gradients": part * FP32, "temporaries": part * size + big}
        resident["temporaries"] = big
    # Masters and gradients are pinned, each in one piece; moments are made beside them.
    pieces: dict[Kind, int] = {"masters": pinned(state["masters"]), "gradients": pinned(state.get("gradients", 0))}
    host: dict[Kind, int] = {**state, **pieces} if setting.accelerator and offload else {}
    if not host:
        resident = {kind: resident.get(kind, 0) + state.get(kind, 0) for kind in {**resident, **state}}
    if stage == 1 and size == BF16:
        resident["gradients"] = resident.get("gradients", 0) + flat * FP32
    return resident, host


def _whole_weights(setting: Setting, stage: int) -> Iterator[Moment]:
    size, trainable = setting.compute_size, setting.model.numel(trainable=True)
    part = _flat(setting) // setting.plan.world_size
    offload = setting.plan.offload.optimizer == "cpu"
    resident, host = _stands(setting, stage)
    bucket = bucket_elements(setting.model.numel()) * FP32
    in_place = stage == 1 and size == BF16
    if in_place:
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

    def resident(self) -> tuple[dict[Kind, int], dict[Kind, int]]:
        """What is always there: in the memory that computes, and on the host."""
        setting, model, world = self._setting, self._setting.model, self._world
        parts = sum(-(-p.numel // world) for p in model.parameters)
        trainable = self._trainable()
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
        if setting.accelerator and setting.plan.offload.parameters == "cpu":
            host["parameters"] = sum(pinned(-(-p.numel // world) * self._size) for p in model.parameters)
        else:
            resident |= weights
        if setting.accelerator and setting.plan.offload.optimizer == "cpu":
            host |= {**state, "masters": pinned(state["masters"]), "gradients": pinned(state["gradients"])}
        else:
            resident |= state
        return resident, host

    def _trainable(self) -> int:
        """Elements of the rank's shards of what is trained."""
        return sum(-(-p.numel // self._world) for p in trained(self._setting.model.parameters))

    def moments(self) -> Iterator[Moment]:
        setting, model = self._setting, self._setting.model
        resident, host = self.resident()
        for span in setting.timeline:
            gathered, name = self._gathered(span), span_name(span, model)
            own: Bytes = {"communication": gathered + self._in_flight(span)}
            yield moment(name, resident, own, span.peak, host=host)
            large = self._large(span) if span.phase == "backward" else 0
            # Our head's gradient goes before the loss's own tensors are dropped, and an embedding's own weights before
            # its gradient; one that is tied stays gathered.
            if large and (setting.loop != "shardlab" or (span.segment == ROOT and self._tied)):
                reduced: Bytes = {"gradients": large, "communication": gathered + self._copies(large)}
                yield moment(f"reduction after the {name}", resident, reduced, span.exit, host=host)
        passing = _update(setting, self._trainable(), -(-largest(trained(model.parameters)) // self._world))
        yield moment("the first update", resident, {"temporaries": passing}, host=host)

    @property
    def _tied(self) -> bool:
        """Whether head and embedding are one."""
        return not self._setting.model.unit(self._setting.model.tail)

    def _copies(self, size: int) -> int:
        """Of gradients that are reduced: the ranks' parts are put together in one, and gloo reduces a copy of that."""
        return size * (1 if self._setting.accelerator else 2) if self._world > 1 else 0

    def _in_flight(self, span: Span) -> int:
        """A full bucket may have to be reduced anywhere in a block's backward pass.

        So it is with gloo; published figures of GPUs have no room for it.
        """
        inside = span.phase == "backward" and 0 < span.segment < self._setting.model.tail
        return self._copies(self._bucket * FP32) if inside and not self._setting.accelerator else 0

    def _large(self, span: Span) -> int:
        """Bytes of the segment's largest gradient, where that is more than a bucket."""
        model = self._setting.model
        units = (span.segment,) if span.segment else (ROOT, model.embedding)
        biggest = max(largest(trained(model.unit(unit))) for unit in units)
        return biggest * FP32 if biggest > self._bucket else 0

    def _gathered(self, span: Span) -> int:
        """The segment's parameters up to the limit of live ones, and a bucket of what follows."""
        model = self._setting.model
        units = (span.segment,) if span.segment else (0, model.embedding)
        sizes = [p.numel for unit in units for p in model.unit(unit) if p.numel >= PERSISTENCE_THRESHOLD]
        limit = largest(model.parameters) + self._bucket
        # A tied head and embedding are gathered from the head's forward pass to the embedding's backward pass.
        tied = largest(model.unit(ROOT)) if self._tied and span.segment else 0
        ahead = 0 if span.phase == "backward" and span.segment == ROOT else self._bucket
        return (min(sum(sizes), limit) + tied + (ahead if self._world > 1 else 0)) * self._size
