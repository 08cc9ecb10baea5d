"""Models that a recipe's `model.builder` names, some of which bring trouble."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shardlab.runtime.stopping import REQUEST
from shardlab.topology import announced_rank

BYTES = 257
MARK_VARIABLE = "SHARDLAB_TEST_MARK"  # names a file that a rank writes just before something happens to it


class Scores(nn.Module):
    """A user's own class: scores of the next byte by the last one, its own summed loss and count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, 16)
        self.scores = nn.Linear(16, BYTES)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = self.scores(self.tokens(batch["input_ids"]))
        targets = batch["targets"]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss, (targets >= 0).sum()


class Normed(Scores):
    """With statistics that are kept in a file, and a table that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.arange(4), persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.tokens(batch["input_ids"]).flatten(0, 1))
        targets = batch["targets"].flatten()
        loss = nn.functional.cross_entropy(self.scores(hidden).float(), targets, reduction="sum")
        return loss, (targets >= 0).sum()


class Troubled(Scores):
    """Calls `trouble` in the training forward of that number, and multiplies the loss by what it returns."""

    def __init__(self, at: int, trouble: Callable[[], float]):
        super().__init__()
        self._at, self._trouble = at, trouble
        self._done = 0

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(batch)
        self._done += self.training
        if self.training and self._done == self._at:
            loss = loss * torch.tensor(self._trouble())
        return loss, count


def scores() -> nn.Module:
    """Nothing goes wrong."""
    return Scores()


def normed() -> nn.Module:
    """Has buffers."""
    return Normed()


class HeldScores(Scores):
    """Stays in a training step until this process is told to stop, if MARK_VARIABLE names a file that isn't there yet.

    The last rank does, in its fifth micro-batch, and writes its process id into the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._done = 0

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self._done += self.training
        rank, world_size = announced_rank()
        mark = Path(os.environ.get(MARK_VARIABLE, os.devnull))
        if self.training and self._done == 5 and rank == world_size - 1 and not mark.exists():
            partial = mark.with_suffix(".partial")
            partial.write_text(str(os.getpid()))
            partial.replace(mark)
            while not REQUEST.came:
                time.sleep(0.02)
        return super().forward(batch)


def held_scores() -> nn.Module:
    """For a job that something happens to in the middle of a step."""
    return HeldScores()


def nan_at_step_3() -> nn.Module:
    """With one micro-batch in a step."""
    return Troubled(3, lambda: float("nan"))


def raises_on_rank_1() -> nn.Module:
    """In the second step, like its kin below."""

    def trouble() -> float:
        raise ValueError("rank one has a bad day")

    return Troubled(2, _on_rank_1(trouble))


def exits_on_rank_1() -> nn.Module:
    """With a code of its own."""
    return Troubled(2, _on_rank_1(lambda: sys.exit(3)))


def dies_on_rank_1() -> nn.Module:
    """As if memory had run out."""

    def trouble() -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    return Troubled(2, _on_rank_1(trouble))


def stays_in_step_2() -> nn.Module:
    """Every rank: a job to be stopped from outside."""

    def trouble() -> float:
        _mark()
        time.sleep(600)
        return 1.0

    return Troubled(2, trouble)


def returns_a_number() -> int:
    """No model."""
    return 3


def _on_rank_1(trouble: Callable[[], float]) -> Callable[[], float]:
    def act() -> float:
        if announced_rank()[0] != 1:
            return 1.0
        _mark()
        return trouble()

    return act


def _mark() -> None:
    Path(os.environ[MARK_VARIABLE]).touch()
