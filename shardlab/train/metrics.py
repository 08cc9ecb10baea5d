"""What a run says while it goes: `metrics.jsonl`, one JSON object per step, and a progress line for people."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardlab.errors import UserError
from shardlab.train.callbacks import Callback, Evaluation, StepResult

if TYPE_CHECKING:
    from shardlab.train.engine import Engine

GiB = 1024**3
PLAIN_SECONDS = 10.0  # between lines where the output is a log, not a terminal


def step_row(result: StepResult, nonfinite_steps: int) -> dict[str, Any]:
    """A step's row of the metrics; `grad_norm` is before clipping."""
    return {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.learning_rate,
        "tokens": result.tokens,
        "skipped": result.skipped,
        "nonfinite_steps": nonfinite_steps,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def evaluation_row(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation's row of the metrics."""
    return {
        "step": evaluation.step,
        "evaluation_loss": evaluation.loss,
        "evaluation_tokens": evaluation.tokens,
    }


class MetricsFile(Callback):
    """Appends rows to `metrics.jsonl`; each is on disk as far as the system is concerned when `write` returns."""

    def __init__(self, path: Path, resumed_from: int = 0):
        """A run that goes on after `resumed_from` steps does the later ones again: their rows are taken out."""
        if path.exists():
            _keep_rows(path, resumed_from)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Add one row. NaN and infinities become the strings "nan" and "inf": JSON has no numbers for them."""
        try:
            self._file.write(json.dumps({key: spelled(value) for key, value in row.items()}, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._file.name} can't be written: {error.strerror}; make room and --resume") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def on_step(self, engine: Engine, result: StepResult) -> None:
        """See `Callback`."""
        self.write(step_row(result, engine.nonfinite_steps))

    def on_evaluate(self, engine: Engine, evaluation: Evaluation) -> None:
        """See `Callback`."""
        self.write(evaluation_row(evaluation))

    def on_end(self, engine: Engine, error: BaseException | None) -> None:
        """See `Callback`."""
        self.close()


def _keep_rows(path: Path, last_step: int) -> None:
    """Keep the rows up to a step; of a process that was killed the last one may be cut off."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= last_step:
            kept.append(line + "\n")
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


def spelled(value: Any) -> Any:
    """`value`, or its name where it is a float that JSON has no number for."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Progress(Callback):
    """A line that is rewritten on a terminal; in a log a line now and then, and always the first and the last."""

    def __init__(self, steps: int, stream: TextIO | None = None, resumed_from: int = 0):
        self._steps = steps
        self._resumed_from = resumed_from
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._started = time.monotonic()
        self._said = -math.inf
        self._first = True

    def step(self, done: int, loss: float | None, tokens_per_second: float, peak_bytes: int) -> None:
        """Say where the run is after `done` of its steps."""
        now = time.monotonic()
        last = done == self._steps
        if not (self._terminal or self._first or last or now - self._said >= PLAIN_SECONDS):
            return
        self._said, self._first = now, False
        left = (now - self._started) / (done - self._resumed_from) * (self._steps - done)
        line = (
            f"step {done}/{self._steps}  loss {'-' if loss is None else f'{loss:.4f}'}  "
            f"{tokens_per_second:,.0f} tokens/s  peak {peak_bytes / GiB:.2f} GiB  {duration(left)} left"
        )
        end = "\n" if last or not self._terminal else ""
        self._stream.write(f"\r\x1b[K{line}{end}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def on_step(self, engine: Engine, result: StepResult) -> None:
        """See `Callback`."""
        self.step(result.step, result.loss, result.tokens_per_second, result.peak_memory_bytes)

    def on_evaluate(self, engine: Engine, evaluation: Evaluation) -> None:
        """See `Callback`."""
        loss, tokens = evaluation.loss, evaluation.tokens
        self.note(f"step {evaluation.step}  evaluation loss {loss:.4f} over {tokens:,} tokens")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._terminal else f"{text}\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """Hours, minutes and seconds for people: "1:02:03", "2:03"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
