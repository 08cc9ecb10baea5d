"""What a step consumes: the micro-batches of one optimizer step on this rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

IGNORED = -100  # a target that is not counted (the field's ignore_index)


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward.

    `tensors` for a language model, each `(micro_batch, sequence)` int64 on the CPU: `input_ids`; `targets`, already
    shifted by one, `IGNORED` where not counted; `position_ids`, starting again at 0 with each document.
    `index` is the position of this micro-batch among all micro-batches of the step, over all ranks: it seeds dropout.
    """

    tensors: Mapping[str, Tensor]
    index: int


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step on this rank.

    `tokens` counts the valid targets of the whole global batch, over all ranks.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    tokens: int
