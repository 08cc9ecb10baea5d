"""What a step consumes: the micro-batches of one optimizer step on this rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

IGNORED = -100  # a target that is not counted (the field's ignore_index)

# What a micro-batch brings from a teacher's cache. Integers, some of which are the bits of numbers: FSDP2 and DeepSpeed
# cast every floating-point input to the type that computes.
TAUGHT_IDS = "teacher_ids"  # (micro_batch, sequence, k) int32
TAUGHT_SHARES = "teacher_shares"  # (micro_batch, sequence, k) int16, the bits of fp16: log shares of these tokens
TAUGHT_REST = "teacher_rest"  # (micro_batch, sequence) int32, the bits of fp32: log share of all other tokens
TAUGHT = (TAUGHT_IDS, TAUGHT_SHARES, TAUGHT_REST)


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward.

    `tensors` for a language model, each `(micro_batch, sequence)` int64 on the CPU: `input_ids`; `targets`, already
    shifted by one, `IGNORED` where not counted; `position_ids`, starting again at 0 with each document;
    with a teacher's cache, what is in `TAUGHT`.
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
