"""What the backends' footprints share: sizes of a number, of an optimizer's state, and of what only a CPU's gloo needs.

A backend's `footprint` stands beside its `prepare` and says, for each point of a step that could be the highest, what
is allocated there, by kind. It is arithmetic on shapes: no torch, no ranks, no model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardlab.plan import Bytes, Kind, Loop, ModelShape, Moment, Offload, ParameterShape, Plan, Span, Timeline

FP32, BF16, INT64 = 4, 2, 8


@dataclass(frozen=True)
class Setting:
    """What a footprint is of. `states`: numbers that the optimizer keeps for each element (AdamW: 2)."""

    model: ModelShape
    plan: Plan
    states: int
    timeline: Timeline
    accelerator: bool = False  # else the ranks are CPU processes, and offloaded state is in the same memory
    loop: Loop = "shardlab"
    teacher: ModelShape | None = None  # that is run forward beside it
    taught: int = 0  # bytes of what a teacher's cache brings for a window (on an accelerator: for a micro-batch)
    masked: int = 0  # bytes of the masks of pruned weights, which every rank has whole

    @property
    def compute_size(self) -> int:
        """Bytes of a number of the weights that compute; where autocast casts them they are fp32."""
        cast = self.loop == "hf" and self.plan.backend == "ddp"
        return BF16 if self.plan.precision == "bf16" and not cast else FP32

    @property
    def state_size(self) -> int:
        """Bytes of a number of sharded weights and their moments, where a backend makes no masters of its own."""
        return BF16 if self.plan.precision == "bf16" and self.loop == "hf-bf16" else FP32

    @property
    def reduced_size(self) -> int:
        """Bytes of a number of gradients while FSDP2 reduces them: fp32 with us, the computing weights' elsewhere."""
        return FP32 if self.loop == "shardlab" else self.compute_size


def shares_memory(setting: Setting) -> bool:
    """Whether FSDP2's collectives go through memory that the ranks share. All are taken to be on one host."""
    ranks = setting.plan.world_size // setting.plan.replicas
    ours = setting.loop == "shardlab" and setting.plan.backend == "fsdp" and not setting.accelerator
    return ours and setting.plan.shared_memory and ranks > 1


def added(one: Bytes, other: Bytes) -> dict[Kind, int]:
    """The sum by kind."""
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}


def masks(setting: Setting) -> tuple[Bytes, Bytes]:
    """Those that are kept, in the memory that computes and on the host, where their bits stay."""
    held: Bytes = {"parameters": setting.masked} if setting.masked else {}
    return ({}, held) if setting.accelerator else (held, {})


@dataclass(frozen=True)
class Standing:
    """What a backend holds on a rank outside of its steps, in bytes.

    `resident` and `host` (see `Moment`) stand between two steps; `building` is the highest point of `prepare`, in the
    memory that computes. `saved` is what the rank writes of a checkpoint, the most over the ranks. At the end the first
    rank collects tensors of the model: `copied` says that they are not views of what stands, and `passing` is what each
    takes on its way.
    """

    resident: Bytes
    host: Bytes
    building: int
    saved: int
    copied: bool
    passing: int


def pinned(size: int) -> int:
    """Bytes of pinned host memory that torch takes for a tensor of `size`: a power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


# Of what blocks save elsewhere: pieces on their way to a file, and blocks' worth that is back at once.
PIECE, STAGED, AHEAD = 2 * 1024**2, 4, 2
SECTOR = 4096


def away_bytes(setting: Setting) -> int:
    """What all blocks save elsewhere in a micro-batch."""
    return sum(-(-span.away // SECTOR) * SECTOR for span in setting.timeline)


def largest_away(setting: Setting) -> int:
    """What one of them does, at the most."""
    return max((span.away for span in setting.timeline), default=0)


def buffer_bytes(offload: Offload, largest: int) -> int:
    """Memory, in the one that computes, by which it comes and goes, where a block saves `largest` bytes."""
    if offload.activations == "none" or not largest:
        return 0
    back = AHEAD * -(-largest // SECTOR) * SECTOR
    return back + STAGED * PIECE if offload.activations == "disk" else back


def stored(setting: Setting, frozen_size: int) -> int:
    """Bytes of a checkpoint, over all ranks: masters and the optimizer's states in fp32, frozen weights as they are."""
    model = setting.model
    return model.numel(trainable=True) * FP32 * (1 + setting.states) + model.numel(trainable=False) * frozen_size


def moment(name: str, *parts: Bytes, host: Bytes | None = None) -> Moment:
    """The sum of `parts` as a moment."""
    total: dict[Kind, int] = {}
    for part in parts:
        for kind, size in part.items():
            total[kind] = total.get(kind, 0) + size
    return Moment(name, total, dict(host or {}))


def span_name(span: Span, model: ModelShape) -> str:
    """For people: "backward pass of block 3"."""
    if span.segment == 0:
        where = "the embedding" if model.blocks else "the model"
    elif span.segment == model.tail:
        where = "the head and the loss"
    else:
        where = f"block {span.segment} of {model.blocks}"
    return f"{span.phase} pass of {where}"


def spans(setting: Setting, resident: Mapping[Kind, int], host: Bytes | None = None) -> Iterator[Moment]:
    """Every span's highest point, where nothing but `resident` lies beside it."""
    for span in setting.timeline:
        yield moment(span_name(span, setting.model), resident, span.peak, host=host)


def update_temporaries(setting: Setting, elements: int, biggest: int, size: int = FP32) -> int:
    """Bytes that the first update makes and drops, of `elements` numbers in tensors of up to `biggest`.

    Ours is fused, and the first one is checked: a tensor's bits are summed as 64-bit integers. torch's AdamW as it
    comes takes the roots of all second moments at once on an accelerator (for-each), and a tensor's root and quotient,
    one tensor after another, on a CPU.
    """
    if setting.loop == "shardlab":
        return biggest * INT64
    return elements * size if setting.accelerator else 2 * biggest * size


def largest(parameters: tuple[ParameterShape, ...]) -> int:
    """Elements of the largest."""
    return max((parameter.numel for parameter in parameters), default=0)


def trained(parameters: tuple[ParameterShape, ...]) -> tuple[ParameterShape, ...]:
    """Those with a gradient."""
    return tuple(parameter for parameter in parameters if parameter.trainable)
