"""What the backends' footprints share: sizes of a number, of an optimizer's state, and of what only a CPU's gloo needs.

A backend's `footprint` stands beside its `prepare` and says, for each point of a step that could be the highest, what
is allocated there, by kind. It is arithmetic on shapes: no torch, no ranks, no model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardlab.plan import Bytes, Kind, ModelShape, Moment, ParameterShape, Plan, Span, Timeline

FP32, BF16, INT64 = 4, 2, 8


@dataclass(frozen=True)
class Setting:
    """What a footprint is of. `states`: numbers that the optimizer keeps for each element (AdamW: 2)."""

    model: ModelShape
    plan: Plan
    states: int
    timeline: Timeline
    accelerator: bool = False  # else the ranks are CPU processes, and offloaded state is in the same memory

    @property
    def compute_size(self) -> int:
        """Bytes of a number that computes."""
        return BF16 if self.plan.precision == "bf16" else FP32


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


def largest(parameters: tuple[ParameterShape, ...]) -> int:
    """Elements of the largest."""
    return max((parameter.numel for parameter in parameters), default=0)


def trained(parameters: tuple[ParameterShape, ...]) -> tuple[ParameterShape, ...]:
    """Those with a gradient."""
    return tuple(parameter for parameter in parameters if parameter.trainable)
