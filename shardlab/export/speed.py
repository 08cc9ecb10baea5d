"""How fast an artifact runs on this machine, and in how much memory: measured in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardlab.errors import UserError
from shardlab.export.artifact import positions_of

LIMIT_SECONDS = 1800
_MARK = "shardlab-speed "


@dataclass(frozen=True)
class SpeedConfig:
    """What is timed: a prompt of `prompt_tokens`, then `new_tokens` one by one, `repeats` times after one warm-up."""

    prompt_tokens: int = 256
    new_tokens: int = 64
    repeats: int = 5
    threads: int | None = None  # None: as many as torch takes


@dataclass(frozen=True)
class Speed:
    """Medians. `peak_bytes` is resident memory above what the libraries took before the model was loaded."""

    runtime: str  # hf, onnx or gguf, with the dtype that transformers computes in
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    peak_bytes: int
    file_bytes: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    threads: int
    load: float  # of the machine over the last minute, before: what else ran shows here

    def line(self) -> str:
        """For people."""
        return (
            f"{self.runtime}: prefill {self.prefill_tokens_per_second:,.0f} tokens/s ({self.prompt_tokens} tokens), "
            f"decode {self.decode_tokens_per_second:,.1f} tokens/s, peak {self.peak_bytes / 2**20:,.0f} MiB, "
            f"{self.file_bytes / 2**20:.2f} MiB on disk; {self.threads} threads, load {self.load:.1f}"
        )


def measure_speed(path: Path, config: SpeedConfig) -> Speed:
    """Of the artifact at `path`, with fewer tokens where it has no room for so many.

    Raises UserError with the last line of what the process said, where it fails.
    """
    most = positions_of(path)
    new = min(config.new_tokens, max(1, most // 5))
    config = replace(config, new_tokens=new, prompt_tokens=min(config.prompt_tokens, most - new))
    environment = dict(os.environ)
    if config.threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.threads)
    done = subprocess.run(
        [sys.executable, "-m", "shardlab.export.speed_job", str(path), json.dumps(asdict(config))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return Speed(**json.loads(line.removeprefix(_MARK)))
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    raise UserError(f"the speed of {path} can't be measured: {last}")


def announce(speed: Speed) -> str:
    """What the process says to `measure_speed`."""
    return _MARK + json.dumps(asdict(speed))


def speed_figures(before: Speed, after: Speed) -> dict[str, Any]:
    """For the card."""
    return {
        "speed": {
            "before": asdict(before),
            "after": asdict(after),
            "decode_speedup": after.decode_tokens_per_second / before.decode_tokens_per_second,
            "prefill_speedup": after.prefill_tokens_per_second / before.prefill_tokens_per_second,
        }
    }


def speed_lines(figures: Mapping[str, Any]) -> list[str]:
    """What `speed_figures` says, for people; that something became slower, too."""
    found = figures["speed"]
    decode, prefill = found["decode_speedup"], found["prefill_speedup"]
    lines = [Speed(**found[when]).line() for when in ("before", "after")]
    slower = "; slower than before here" if decode < 1 else ""
    return [*lines, f"decodes {decode:.2f} times as fast, prefills {prefill:.2f}{slower}"]
