"""Global batches, each a pure function of the step, and a rank's window of one."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.data.window import IGNORED, MicroBatch, Window
from tests.distributed.models import VOCABULARY

LENGTH = 16
Batch = dict[str, Tensor]


def _text(step: int, sequences: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (sequences, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(sequences, 1)
    return {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:].clone(), "position_ids": positions}


def mixed(step: int) -> Batch:
    """Eight sequences with unlike numbers of targets; the second has none at all, the third two documents."""
    batch = _text(step, 8)
    for row in range(8):
        batch["targets"][row, LENGTH - (3 * row % LENGTH) :] = IGNORED
    batch["targets"][1] = IGNORED
    batch["position_ids"][2, 6:] -= 6
    batch["targets"][2, 5] = IGNORED
    return batch


def incomplete(step: int) -> Batch:
    """The data ends within step 2: its last three rows are filler."""
    batch = mixed(step)
    if step == 2:
        batch["targets"][5:] = IGNORED
    return batch


def lopsided(step: int) -> Batch:
    """The second half has no target at all: with two ranks or four, whole ranks have none."""
    batch = mixed(step)
    batch["targets"][4:] = IGNORED
    return batch


def ragged(step: int) -> Batch:
    """Four sequences with 8, 8, 8 and 1 targets."""
    batch = _text(step, 4)
    batch["targets"][:, 8:] = IGNORED
    batch["targets"][3, 1:] = IGNORED
    return batch


def odd_rows_masked(step: int) -> Batch:
    """Four sequences of 8 tokens, the odd ones with targets at the first three positions only."""
    batch = {name: value[:, :8].clone() for name, value in _text(step, 4).items()}
    batch["targets"][1::2, 3:] = IGNORED
    return batch


def dozen(step: int) -> Batch:
    """Twelve sequences, which 1, 2, 3 and 4 ranks can share, with unlike numbers of targets."""
    batch = _text(step, 12)
    for row in range(12):
        batch["targets"][row, LENGTH - row :] = IGNORED
    return batch


DATA: dict[str, Callable[[int], Batch]] = {
    "mixed": mixed,
    "incomplete": incomplete,
    "lopsided": lopsided,
    "ragged": ragged,
    "odd rows masked": odd_rows_masked,
    "dozen": dozen,
}


def sequences(data: str) -> int:
    """Rows of a global batch."""
    return DATA[data](0)["targets"].shape[0]


def window(data: str, step: int, micro: int, rank: int, world: int) -> Window:
    """This rank's part of the global batch, in micro-batches of `micro` sequences."""
    batch = DATA[data](step)
    count = batch["targets"].shape[0] // micro // world
    parts = tuple(
        MicroBatch({name: value[i * micro : (i + 1) * micro] for name, value in batch.items()}, i)
        for i in range(rank * count, (rank + 1) * count)
    )
    return Window(step, parts, int((batch["targets"] != IGNORED).sum()))
