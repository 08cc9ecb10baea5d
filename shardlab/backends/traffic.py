"""What each backend sends in a window, and what it moves beside the model's own forward and backward pass.

Counted on real runs (a test holds it): torch's dispatcher shows every collective. It is arithmetic on shapes, as the
footprints are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardlab.backends.ddp import BUCKET_BYTES
from shardlab.backends.placement import BF16, FP32, Setting, away_bytes, shares_memory, trained
from shardlab.backends.zero_config import PERSISTENCE_THRESHOLD, bucket_elements
from shardlab.plan import ROOT, ParameterShape

Collective = Literal["all-reduce", "all-gather", "reduce-scatter"]
# What it can go on behind where there is an engine for it: a micro-batch's forward or backward pass, or none.
Behind = Literal["forward", "backward", "nothing"]


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a window.

    `size` is bytes of the whole tensors, of all `calls` together; `times` how many micro-batches they belong to.
    `ranks` take part, each `stride` ranks from the next. `copied`: bytes read and written on the device around them.
    `shared`: through memory that ranks of one host share, where nothing is sent.
    """

    collective: Collective
    size: int
    calls: int
    behind: Behind
    times: int
    ranks: int
    stride: int = 1
    copied: int = 0
    shared: bool = False


def exchanges(setting: Setting) -> list[Exchange]:
    """All of a window, but for a few numbers (the loss, the norm)."""
    if setting.plan.world_size == 1:
        return []
    backend = setting.plan.backend
    if backend == "ddp":
        return [_all_reduce(setting, BUCKET_BYTES // FP32, "backward", 1)]
    sharded = {"fsdp": _fsdp, "zero3": _stage_3}.get(backend, _whole_weights)
    return [exchange for exchange in sharded(setting) if exchange.calls]  # what stays gathered is none


def _all_reduce(setting: Setting, bucket: int, behind: Behind, times: int) -> Exchange:
    """Of every gradient in fp32."""
    elements = setting.model.numel(trainable=True)
    size, calls = elements * FP32 * times, -(-elements // bucket) * times
    return Exchange("all-reduce", size, calls, behind, times, setting.plan.world_size)


def _whole_weights(setting: Setting) -> Iterator[Exchange]:
    """ZeRO-1 and 2: DeepSpeed all-reduces buckets (and keeps a part); then the weights are gathered.

    Stage 1 does it once, after the window's last backward pass; stage 2 after each, where it may overlap.
    """
    plan, elements = setting.plan, setting.model.numel(trainable=True)
    bucket = bucket_elements(setting.model.numel())
    if plan.backend == "zero1":
        yield _all_reduce(setting, elements if plan.precision == "bf16" else bucket, "nothing", 1)
    else:
        yield _all_reduce(setting, bucket, "backward", plan.accumulation)
    yield Exchange("all-gather", elements * setting.compute_size, 1, "nothing", 1, plan.world_size)


def _fsdp(setting: Setting) -> Iterator[Exchange]:
    """A block is gathered for each of its passes, other units once; gradients are reduced after each micro-batch."""
    plan, model = setting.plan, setting.model
    ranks, count = plan.world_size // plan.replicas, plan.accumulation
    shared = shares_memory(setting)

    def whole(parameters: tuple[ParameterShape, ...]) -> int:
        """Elements, with the padding of each to rows for every rank."""
        return sum(-(-p.shape[0] // ranks) * ranks * (p.numel // p.shape[0]) for p in parameters if p.numel and p.shape)

    units = [model.unit(unit) for unit in (ROOT, *range(1, model.embedding + 1))]
    blocks = [unit for unit in units[1 : model.blocks + 1] if unit]
    others = [unit for unit in (units[0], *units[model.blocks + 1 :]) if unit]
    if ranks > 1:
        forward = [whole(unit) for unit in (*blocks, *others)]
        backward = [whole(unit) for unit in blocks] if plan.reshard_after_forward else []
        passes: tuple[tuple[list[int], Behind], ...] = ((forward, "forward"), (backward, "backward"))
        for passing, behind in passes:
            size = sum(passing) * setting.compute_size * count
            # Copied out of one buffer into the parameters.
            calls = len(passing) * count
            yield Exchange("all-gather", size, calls, behind, count, ranks, copied=2 * size, shared=shared)
    reduced = [whole(trained(unit)) for unit in (*blocks, *others) if trained(unit)]
    size, calls = sum(reduced) * FP32 * count, len(reduced) * count
    copied = size + sum(reduced) * setting.compute_size * count
    if shared:
        copied += size + size // ranks  # a rank's part of every buffer is read, the sum is written
    if ranks > 1:
        yield Exchange("reduce-scatter", size, calls, "backward", count, ranks, copied=copied, shared=shared)
    if plan.replicas > 1:
        yield Exchange("all-reduce", size // ranks, calls, "backward", count, plan.replicas, stride=ranks)


def _stage_3(setting: Setting) -> Iterator[Exchange]:
    """Modules are gathered for each pass, the embedding for its own only; small parameters stay gathered.

    Kept within an eighth of what was counted: DeepSpeed keeps some for their next use, and gathers some again.
    """
    plan, model, world = setting.plan, setting.model, setting.plan.world_size
    large = [p for p in model.parameters if p.numel >= PERSISTENCE_THRESHOLD]
    small = sum(p.numel for p in model.parameters if p.numel < PERSISTENCE_THRESHOLD)
    again = [p for p in large if p.unit != model.embedding]
    count, bucket = plan.accumulation, bucket_elements(model.numel())
    passes: tuple[tuple[list[ParameterShape], Behind], ...] = ((large, "forward"), (again, "backward"))
    for passing, behind in passes:
        size = sum(p.numel for p in passing) * setting.compute_size * count
        yield Exchange("all-gather", size, len(passing) * count, behind, count, world, copied=2 * size)
    elements = model.numel(trainable=True)
    size = elements * FP32 * count
    yield Exchange("reduce-scatter", size, -(-elements // bucket) * count, "backward", count, world, copied=size)
    if small:
        yield Exchange("all-gather", small * setting.compute_size, 1, "nothing", 1, world)


@dataclass(frozen=True)
class Moves:
    """Bytes that a window moves on this rank beside the passes and the collectives.

    `update` is read and written by the optimizer and around it, `host` the same where that is on the host;
    `up` goes from host to device, `down` the other way.
    """

    update: int
    host: int
    up: int
    down: int


def moves(setting: Setting) -> Moves:
    """The optimizer's, and what offload sends over the host's link."""
    found = _state_moves(setting)
    if setting.plan.offload.activations != "cpu":
        return found
    saved = away_bytes(setting) * setting.plan.accumulation
    return replace(found, up=found.up + saved, down=found.down + saved)


def _state_moves(setting: Setting) -> Moves:
    plan, model, size = setting.plan, setting.model, setting.compute_size
    sharded = 1 if plan.backend == "ddp" else plan.world_size // (plan.replicas if plan.backend == "fsdp" else 1)
    elements = model.numel(trainable=True)
    part = -(-elements // sharded)
    # Reads weight, gradient and states, writes weight and states; before it the norm, the clipping and the zeroing.
    step = part * FP32 * (3 + 2 * setting.states)
    around = part * FP32 * 4
    if plan.backend in ("ddp", "zero3") and size == BF16:
        around += part * (FP32 + BF16)  # the copy that computes
    if plan.backend in ("zero1", "zero2"):
        around += part * FP32 * 4  # its gradients into one tensor, its weights out of one
    if plan.offload.optimizer == "none":
        return Moves(step + around, 0, 0, 0)
    # fsdp sends the gradients of every micro-batch, and its masters for every gather; ZeRO what the window comes to.
    if plan.backend == "fsdp":
        gathers = 2 if plan.reshard_after_forward else 1
        return Moves(0, step + around, part * FP32 * gathers * plan.accumulation, part * FP32 * plan.accumulation)
    up, down = part * size, part * FP32
    if plan.offload.parameters == "cpu":
        up += 2 * -(-model.numel() // sharded) * size * plan.accumulation
    if plan.backend == "zero2":
        down *= plan.accumulation
    return Moves(around, step, up, down)
