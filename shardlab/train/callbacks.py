"""What a run tells while it goes: to metrics, progress and trackers, and to a user's own code.

A callback is told what has happened and changes nothing of it: the loop has no return values to mind, so the run is the
same with and without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardlab.train.engine import Engine


@dataclass(frozen=True)
class StepResult:
    """What one window did.

    `loss` is the mean over the global batch's valid tokens, before the update; None where there were none. `step`
    counts windows from 1, `seconds` is the step's own time, without the reading of its batch; `peak_memory_bytes` is
    this rank's since the meter's reset; None without callbacks, for it takes a tenth of a millisecond to ask.
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: int
    skipped: bool
    step: int
    seconds: float
    peak_memory_bytes: int | None

    @property
    def finite(self) -> bool:
        """Whether nothing in it was NaN or infinite."""
        return all(math.isfinite(value) for value in (self.loss, self.grad_norm) if value is not None)

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens of the global batch by the step's time."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per token over all ranks' held-out batches, after `step` windows. Without a token it is NaN."""

    step: int
    loss: float
    tokens: int


class Callback:
    """Told what an engine does; every method may be left out.

    Each rank has its own and calls it in the same order, so a callback may use collectives, on all ranks alike;
    `engine.topology.is_main` is the rank that writes. An exception ends the run, as one in the loop would.
    """

    def on_start(self, engine: Engine) -> None:
        """The model is sharded, no step is done."""

    def on_step(self, engine: Engine, result: StepResult) -> None:
        """A window is done, or was left out (`result.skipped`), also where that then stops the run."""

    def on_evaluate(self, engine: Engine, evaluation: Evaluation) -> None:
        """Held-out batches were measured."""

    def on_end(self, engine: Engine, error: BaseException | None) -> None:
        """The engine closes, because of `error` or in good order; called whatever the others did."""
