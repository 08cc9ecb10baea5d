"""How contestants take turns: the parent's side (`Contestant`), their own (`Turns`), and the work that both know of.

A contestant is one process for each rank. It trains until it is ended, and after every few optimizer steps it waits for
its next turn: so several can live beside each other and never run at once.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """What there is to do; `micro_batch` (sequences) and `accumulation` are a rank's.

    `model` is a config of transformers; `shard`, `train` and `ours` are of our recipe: two sections, and what `model`
    has beside the config. With `bound` the rate of matrix products is measured before each turn.
    """

    model: Mapping[str, Any]
    precision: str
    sequence: int
    micro_batch: int
    accumulation: int
    ranks: int = 1
    bound: bool = False
    shard: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Sequences of an optimizer step, over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def tokens(self) -> int:
        """Of an optimizer step, over all ranks."""
        return self.rows * self.sequence


@dataclass(frozen=True)
class Turn:
    """A few steps of one contestant, per step.

    Seconds are the slowest rank's, CPU seconds all ranks'; the loss is the last step's. `products` is floating-point
    operations per second in matrix products of all ranks at once, `cpu_products` the same per CPU-second; `peak_bytes`
    the largest rank's memory so far, with its libraries.
    """

    seconds: float
    cpu_seconds: float
    loss: float | None
    products: float = 0.0
    cpu_products: float = 0.0
    peak_bytes: float = 0.0


class Contestant:
    """The parent's side of one contestant: starts its ranks, gives it turns, ends them."""

    def __init__(
        self, name: str, work: Work, *, threads: int, block: int, environment: Mapping[str, str] | None = None
    ):
        own = ["--contestant", name, "--work", json.dumps(asdict(work)), "--block", str(block)]
        base = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        ranks = _ranks(work.ranks)
        self._processes = [
            subprocess.Popen(
                [sys.executable, sys.argv[0], *own],
                env=base | rank,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]

    def ready(self) -> None:
        """Wait until the first step can begin."""
        self._answers()

    def turn(self) -> Turn:
        """Let it run its steps."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        turns = self._answers()
        return Turn(
            max(turn.seconds for turn in turns),
            sum(turn.cpu_seconds for turn in turns),
            turns[0].loss,
            sum(turn.products for turn in turns),
            sum(turn.cpu_products for turn in turns) / len(turns),
            max(turn.peak_bytes for turn in turns),
        )

    def _answers(self) -> list[Turn]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self.close()
                raise SystemExit("a contestant ended early: its message is above")
            found.append(Turn(**json.loads(line)))
        return found

    def close(self) -> None:
        """End it."""
        for process in self._processes:
            process.kill()
            process.wait()


def _ranks(count: int) -> list[dict[str, str]]:
    """What a launcher would set for each rank of a job on this host."""
    if count == 1:
        return [{}]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_WAIT_POLICY": "passive"}
    job |= {"LOCAL_WORLD_SIZE": str(count), "DS_ACCELERATOR": "cpu"}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


class Turns:
    """A contestant's side: times its own steps, and sleeps while others have their turn."""

    def __init__(self, block: int, work: Work):
        self.work = work
        self._block = block
        self._left = block
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints

    def begin(self) -> None:
        """Ready, before the first step."""
        self._wait(Turn(0.0, 0.0, None))

    def step_done(self, loss: Any = None) -> None:
        """To be called after each optimizer step."""
        self._left -= 1
        if self._left == 0:
            seconds, cpu = time.perf_counter() - self._started, time.process_time() - self._cpu_started
            last = None if loss is None else float(loss)
            self._wait(Turn(seconds / self._block, cpu / self._block, last, *self._products, _peak_bytes()))

    def _wait(self, turn: Turn) -> None:
        print(json.dumps(vars(turn)), file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._left = self._block
        self._products = products(self.work) if self.work.bound else (0.0, 0.0)
        self._started, self._cpu_started = time.perf_counter(), time.process_time()


def _peak_bytes() -> float:
    """Anonymous and shared pages of this process at the most; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = {words[0]: int(words[1]) * 1024 for line in lines if (words := line.split())[-1:] == ["kB"]}
    return float(sizes["VmHWM:"] - sizes["RssFile:"])


def products(work: Work, repetitions: int = 6) -> tuple[float, float]:
    """Rate of the product that most of a block's work is: (FLOP per second, per CPU-second), medians."""
    import torch

    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    rows = max(1024, work.micro_batch * work.sequence)
    left = torch.randn(rows, work.model["hidden_size"], dtype=dtype)
    right = torch.randn(work.model["intermediate_size"], left.shape[1], dtype=dtype)
    flop = 2.0 * rows * right.numel()
    rates = []
    for _ in range(repetitions):
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(8):
            torch.nn.functional.linear(left, right)
        rates.append((8 * flop / (time.perf_counter() - started), 8 * flop / (time.process_time() - cpu)))
    middle = [sorted(each)[repetitions // 2] for each in zip(*rates, strict=True)]
    return middle[0], middle[1]
