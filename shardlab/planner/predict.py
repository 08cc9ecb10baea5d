"""A plan's footprint and cost: the trace of a micro-batch, the backend's placement, and what neither can see.

Truth has two layers. What the allocator hands out (`Footprint.tensors`) is counted: the trace agrees with the
allocator's own events. The process's memory is that and a term that was measured, not derived (`process.json`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from shardlab.backends import ddp_footprint, fsdp_footprint, plain_footprint, teacher_footprint, zero_footprint
from shardlab.backends.placement import Setting, added, away_bytes, buffer_bytes, largest_away, masks, moment
from shardlab.backends.stream import footprint as stream_footprint
from shardlab.data.window import TAUGHT
from shardlab.model.shape import model_shape, teacher_shape
from shardlab.model.trainable import Trainable
from shardlab.plan import (
    ROOT,
    Bytes,
    Disk,
    Footprint,
    Loop,
    ModelShape,
    Moment,
    Offload,
    ParameterShape,
    Plan,
    Timeline,
)
from shardlab.planner.around import Saving, around, snapshot_bytes, standing
from shardlab.planner.cost import Cost, cost
from shardlab.planner.machine import Machine
from shardlab.planner.mixed import mixed
from shardlab.planner.plain import PlainLoop, casts, weights_precision
from shardlab.planner.storages import Passage, alike, on_the_line
from shardlab.planner.trace import Gradients, Tracer
from shardlab.recipe import SGD, AdamW

_PROCESS: dict[str, Any] = json.loads(resources.files("shardlab.planner").joinpath("process.json").read_text())


def states_per_element(optimizer: AdamW | SGD) -> int:
    """Numbers that an optimizer keeps beside each element that it trains."""
    if isinstance(optimizer, AdamW):
        return 2
    return 1 if optimizer.momentum else 0


def gradients_of(plan: Plan, loop: Loop = "shardlab") -> Gradients:
    """What becomes of a weight's gradient, as the trace is to run it."""
    if plan.backend == "stream":
        return "buffers"
    if plan.backend == "ddp":
        return "buffers" if loop == "shardlab" else "units"
    if plan.backend == "fsdp":
        return "units"
    return "units" if plan.backend == "zero1" and plan.precision == "fp32" else "each"


class Predictor:
    """Footprints of plans for one model and one shape of batch. Traces are kept: plans share most of them.

    `module` is of no use afterwards; `batch(micro_batch)` gives tensors shaped as the run's.
    """

    def __init__(
        self,
        module: Trainable,
        batch: Callable[[int], Mapping[str, Tensor]],
        optimizer: AdamW | SGD,
        *,
        accelerator: bool = False,
        loop: Loop = "shardlab",
        saving: Saving | None = None,
        masked: int = 0,
    ):
        """Without `saving` nothing is known of what comes around the steps. `masked`: bytes of masks that are kept."""
        self.shape = model_shape(module)
        taught = module.distillation
        self._teacher = None if taught is None or taught.teacher is None else teacher_shape(taught.teacher)
        self.block_class = type(module.blocks[0]).__name__ if module.blocks else ""
        self.loop = loop
        self.saving = saving
        self._masked = masked
        self._module = module
        self._tracer = Tracer(module)
        self._batch = batch
        self._states = states_per_element(optimizer)
        self._accelerator = accelerator
        self._traces: dict[tuple[Any, ...], dict[int, list[Passage]]] = {}
        self._timelines: dict[tuple[Any, ...], Timeline] = {}

    def _timeline(self, plan: Plan) -> Timeline:
        """With some blocks that are run again, and some not, it is made of both kinds."""
        count = plan.recompute_blocks
        if count is None or plan.recompute == "none":
            return self._uniform(plan)
        again = replace(plan, recompute_blocks=None)
        if plan.backend == "stream":  # it keeps the inputs of blocks in its own way
            again = replace(again, offload=Offload())
        return mixed(self._uniform(again), self._uniform(replace(plan, recompute="none")), count)

    def _uniform(self, plan: Plan) -> Timeline:
        gradients = gradients_of(plan, self.loop)
        key = (*self._traced_as(plan), plan.micro_batch, gradients)
        if key not in self._timelines:
            self._timelines[key] = self._tracer.spans(self._trace(plan), gradients)
        return self._timelines[key]

    def _traced_as(self, plan: Plan) -> tuple[Any, ...]:
        """What makes another trace necessary, beside the batch."""
        plain_fsdp = self.loop != "shardlab" and plan.backend == "fsdp"
        away = plan.offload.activations != "none"
        return plan.recompute, weights_precision(plan, self.loop), casts(plan, self.loop), plain_fsdp, away

    def _trace(self, plan: Plan) -> list[Passage]:
        """Two smaller micro-batches that ran the same operations give a larger one without a trace of its own."""
        buffers, size = gradients_of(plan, self.loop) == "buffers", plan.micro_batch
        known = self._traces.setdefault((*self._traced_as(plan), buffers), {})
        if size not in known:
            batch = self._batch(size)
            chunks = self._tracer.chunks(batch)
            sizes = [one for one in sorted(known) if one < size and self._tracer.chunks(self._batch(one)) == chunks]
            for low, high in combinations(sizes if chunks is not None else [], 2):
                if alike(known[low], known[high]):
                    known[size] = on_the_line(known[low], known[high], (size - low) / (high - low))
                    break
            else:
                if isinstance(self._module, PlainLoop):
                    self._module.autocast = casts(plan, self.loop)
                    self._module.units_are_blocks(only=plan.backend == "fsdp")
                precision = weights_precision(plan, self.loop)
                away = plan.offload.activations != "none"
                known[size] = self._tracer.trace(batch, precision, plan.recompute, buffers=buffers, away=away)
        return known[size]

    def _setting(self, plan: Plan) -> Setting:
        shape, timeline = self._shape(plan), self._timeline(plan)
        taught = sum(one.nbytes for name, one in self._batch(plan.micro_batch).items() if name in TAUGHT)
        taught *= 1 if self._accelerator else plan.accumulation
        kind = self._accelerator, self.loop
        found = Setting(shape, plan, self._states, timeline, *kind, self._teacher, taught, self._masked)
        return replace(found, timeline=teacher_footprint.timeline(found))

    def _shape(self, plan: Plan) -> ModelShape:
        """The units of a plain loop's FSDP are its blocks; embedding and head stay with the root."""
        if self.loop == "shardlab" or plan.backend != "fsdp":
            return self.shape
        apart = (self.shape.tail, self.shape.embedding)
        parameters = (replace(p, unit=ROOT) if p.unit in apart else p for p in self.shape.parameters)
        return replace(self.shape, parameters=tuple(parameters))

    def moments(self, plan: Plan) -> list[Moment]:
        """Every point of a step that could be the highest, the copy for a save beside it."""
        return self._moments(self._setting(plan))

    def _moments(self, setting: Setting) -> list[Moment]:
        found, saving = placed(setting), self.saving
        stands = standing(setting)
        if saving is None or stands is None or not saving.copies:
            return found
        copy: Bytes = {"snapshot": snapshot_bytes(setting, stands)}
        if not saving.during:  # the last step is the first to be saved: nothing but what stands is beside it
            found = [*found, moment("the copy for the save", stands.resident, host=stands.host)]
        last = len(found) - 1
        return [_with_copy(m, copy, setting) if saving.during or i == last else m for i, m in enumerate(found)]

    def window_bytes(self, plan: Plan) -> int:
        """Of backend stream: one hidden state of every micro-batch of a window."""
        return stream_footprint.Window(self._setting(plan)).hidden

    def away_bytes(self, plan: Plan) -> int:
        """What the blocks save elsewhere in a window."""
        return away_bytes(self._setting(plan)) * plan.accumulation

    def cost(self, plan: Plan, machine: Machine) -> Cost | None:
        """Seconds of a step; None where the machine's speed is not known."""
        tokens = next(iter(self._batch(1).values())).numel() * plan.global_batch_size
        return cost(self._setting(plan), machine, tokens)

    def footprint(self, plan: Plan) -> Footprint:
        """The highest of them, and the process's memory there; and what is around the steps."""
        setting = self._setting(plan)
        peak = max(self._moments(setting), key=lambda moment: moment.total)
        found = _process(peak, plan, accelerator=self._accelerator, loop=self.loop)
        if self.saving is not None:
            term = _term(plan, accelerator=self._accelerator, loop=self.loop)
            beside = round(term["bytes"] + term["spread_bytes"])
            # Blocks that one process frees it keeps (several ranks keep small ones only): they may be there at the end.
            keeps = plan.world_size == 1 or plan.keep_freed
            kept = _passing(peak) if keeps and not self._accelerator else 0
            found = replace(found, around=around(setting, self.saving, beside, term["spread_share"], kept))
        if not self._accelerator:  # masks may stay in the file that they are read from: no memory of the process
            found = replace(found, low=max(0, found.low - setting.masked))
        if plan.backend == "stream":
            return replace(found, disk=stream_footprint.disk(setting))
        if plan.offload.activations == "disk":
            size = away_bytes(setting)
            found = replace(found, disk=Disk(size, size * plan.accumulation, size * plan.accumulation))
        mapped = 0 if self._accelerator else teacher_footprint.mapped(setting)
        return replace(found, low=max(0, found.low - self._dropped(plan) - mapped))

    def _dropped(self, plan: Plan) -> int:
        """What a plain loop that drops the model's output at once (the HF Trainer's) has less of: the logits."""
        if not isinstance(self._module, PlainLoop):
            return 0
        tokens = self._batch(plan.micro_batch)["input_ids"].numel()
        size = 2 if weights_precision(plan, self.loop) == "bf16" else 4
        return tokens * self._module.last.out_features * size


def placed(setting: Setting) -> list[Moment]:
    """What the plan's backend says of it."""
    unsharded = ddp_footprint if setting.loop == "shardlab" else plain_footprint
    own = {"ddp": unsharded, "fsdp": fsdp_footprint, "stream": stream_footprint}
    part: Any = own.get(setting.plan.backend, zero_footprint)
    found = teacher_footprint.with_teacher(setting, list(part.footprint(setting)))
    if setting.masked:
        held, host = masks(setting)
        found = [moment(one.name, one.bytes, held, host=added(one.host, host)) for one in found]
    return _with_shelves(found, setting) if setting.plan.offload.activations != "none" else found


def _with_shelves(moments: list[Moment], setting: Setting) -> list[Moment]:
    """The buffers that what the blocks save comes and goes by, which stay; and on the host what is there."""
    offload, largest = setting.plan.offload, largest_away(setting)
    buffers: Bytes = {"activations": buffer_bytes(offload, largest)}
    host: Bytes = {"activations": away_bytes(setting)} if offload.activations == "cpu" else {}
    return [moment(one.name, one.bytes, buffers, host={**one.host, **host}) for one in moments]


def untraced(
    model: nn.Module,
    plan: Plan,
    optimizer: AdamW | SGD,
    *,
    accelerator: bool,
    teacher: ModelShape | None = None,
    masked: int = 0,
) -> Setting:
    """Of any module, its state alone: for what follows from that."""
    shapes = [ParameterShape(name, tuple(p.shape), p.requires_grad, ROOT) for name, p in model.named_parameters()]
    shape = ModelShape(tuple(shapes), 0, has_tail=False)
    return Setting(shape, plan, states_per_element(optimizer), (), accelerator, teacher=teacher, masked=masked)


def floor_bytes(setting: Setting, saving: Saving) -> int:
    """What a rank needs at the very least, in the memory that computes."""
    stands = standing(setting)
    copied = stands is not None and saving.copies and saving.during and not setting.accelerator
    copy = stands.saved if stands is not None and copied else 0
    return max(moment.total for moment in placed(setting)) + copy


def _with_copy(moment: Moment, copy: Bytes, setting: Setting) -> Moment:
    """`copy` is on the host, which on a CPU is the memory that computes."""
    if setting.accelerator:
        return replace(moment, host={**moment.host, **copy})
    return replace(moment, bytes={**moment.bytes, **copy})


def _term(plan: Plan, *, accelerator: bool, loop: Loop) -> dict[str, float]:
    """See `process.json`."""
    ours = "kept" if plan.keep_freed else "alone" if plan.world_size == 1 else "ranks"
    measured: dict[str, dict[str, float]] = _PROCESS[
        "accelerator" if accelerator else (ours if loop == "shardlab" else "plain")
    ]
    return measured[plan.precision]


def _passing(peak: Moment) -> int:
    """Bytes that are gone by the end of the step."""
    return sum(peak.bytes.get(kind, 0) for kind in ("activations", "head", "logits", "temporaries"))


def _process(peak: Moment, plan: Plan, *, accelerator: bool, loop: Loop) -> Footprint:
    """The process around the tensors: scratch of kernels, memory that malloc keeps for itself, whole pages."""
    term, libraries = _term(plan, accelerator=accelerator, loop=loop), _PROCESS["libraries"]
    host = libraries["zero"] if plan.backend.startswith("zero") else libraries["other"]
    kept = round(term["passing_share"] * _passing(peak))  # in holes between blocks; half of it was seen too
    spread = round(term["spread_bytes"] + term["spread_share"] * peak.total)
    middle = peak.total + round(term["bytes"]) + kept
    if plan.compile:
        compiler = _PROCESS["compiler"]
        middle += compiler["bytes"] + round(compiler["passing_share"] * _passing(peak))
        spread += compiler["spread_bytes"]
    return Footprint(
        moment=peak.name,
        bytes=peak.bytes,
        host=peak.host,
        tensors=peak.total,
        low=max(0, middle - kept // 2 - spread),
        middle=middle,
        high=middle + spread,
        libraries=_PROCESS["context"] if accelerator else host,
        host_libraries=host if accelerator else 0,
    )
