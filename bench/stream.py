"""Training larger than memory: backend stream beside the same model in memory, and beside DeepSpeed's NVMe offload.

Each contestant is a process of its own that trains the same Llama-like model on the same real text (the standard
library's source) in bf16: a few steps, of which the first are not timed. Parts, each by `--only`:

- `memory`: 1.0B parameters within 2 GiB, 512 and 4096 tokens a step; the peer has the model in memory without a limit
  (19 GiB), with and without recompute;
- `large`: 3B parameters within 3 GiB;
- `deepspeed`: beside ZeRO-3 with parameters and optimizer on NVMe, 138M and 500M; needs libaio's headers;
- `growth`: 0.25B to 2B parameters.

A step's floor is what the machine alone would take: the larger of its bytes by the disk's rate and its floating-point
operations by that of matrix products, both measured here in the same run, nothing recomputed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from report import MiB, Report, Target, say
from stream_contestants import Contestant, measure, why_not_deepspeed

TABLE = {
    "": "", "parameters": ".2f", "tokens/step": "d", "s/step": ".2f", "tokens/s": ".1f", "to memory": ".2f",
    "waiting": ".1%", "peak MiB": ".0f", "GB read": ".1f", "GB written": ".1f", "floor s": ".2f", "of floor": ".2f",
    "loss": ".4f",
}  # fmt: skip
PARTS = ("memory", "large", "deepspeed", "growth")
OF_MEMORY = {512: 0.9, 4096: 1.0}  # aims of the first part, by tokens a step
TWICE, THIRD = 2.0, 1 / 3  # of DeepSpeed's speed, and of its memory


@dataclass(frozen=True)
class Rates:
    """What the machine does at its best: bytes per second of the disk, read and written at once; operations."""

    disk: float
    products: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given several times")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny shows only that it runs")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each contestant")
    parser.add_argument("--tokens", type=int, action="append", help="a step's tokens in part memory [512 and 4096]")
    parser.add_argument("--billions", type=float, action="append", help="sizes of part growth [0.25 0.5 1 2]")
    parser.add_argument("--set", action="append", default=[], help="of the recipe, for the streamed contestants")
    parser.add_argument("--directory", type=Path, help="on the disk to use [default: the temporary directory]")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each contestant")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # its own process
    options = parser.parse_args()
    if options.contestant is not None:
        print("\n" + json.dumps(measure(Contestant(**json.loads(options.contestant)))))
        return 0
    report = Report("Larger than memory: a Llama-like model, bf16, AdamW, real text", TABLE)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rates = machine_rates(Path(directory), options.threads, tiny=options.size == "tiny")
        report.notes = [f"disk {rates.disk / 1e9:.2f} GB/s, matrix products {rates.products / 1e9:.0f} GFLOP/s"]
        Bench(options, Path(directory), rates, report).run()
    report.print(options.json)
    return 0


class Bench:
    """Runs the parts that are asked for, and adds their rows to the report."""

    def __init__(self, options: argparse.Namespace, directory: Path, rates: Rates, report: Report):
        self._options, self._directory, self._rates, self._report = options, directory, rates, report
        self._notes = list(report.notes)

    def run(self) -> None:
        parts = {"memory": self._memory, "large": self._large, "deepspeed": self._deepspeed, "growth": self._growth}
        for name in self._options.only or PARTS:
            parts[name]()
        self._report.notes = self._notes

    def _base(self, **values: Any) -> Contestant:
        options = self._options
        made = Contestant(steps=options.steps, threads=options.threads, **values)
        if options.size == "tiny":
            made = replace(made, width=64, blocks=3, sequence=64, tokens=made.tokens // 8, limit="1GiB")
        return replace(made, overrides=tuple(options.set) if made.kind == "stream" else ())

    def _memory(self) -> None:
        for tokens in self._options.tokens or OF_MEMORY:
            one = self._base(blocks=34, tokens=tokens, limit="2GiB")
            plain = self._row(replace(one, kind="memory", overrides=()), "in memory")
            full = self._row(replace(one, kind="memory", recompute="full", overrides=()), "in memory, recompute")
            mine = self._row(one, f"stream, {one.limit}", plain)
            for peer, what in ((plain, "no recompute"), (full, "recompute")):
                if peer is not None and mine is not None:
                    ratio = mine["s/step"] / peer["s/step"]
                    limit = 1 / OF_MEMORY.get(tokens, 1.0)
                    self._report.targets.append(Target(f"{tokens} tokens, stream / memory, {what}", ratio, limit))

    def _large(self) -> None:
        self._row(self._base(blocks=37, width=2560, tokens=512, limit="3GiB"), "stream, 3GiB")

    def _deepspeed(self) -> None:
        reason = why_not_deepspeed()
        if reason is not None:
            self._notes.append(f"part deepspeed skipped: {reason}")
            return
        for shape in ({"blocks": 12, "width": 768}, {"blocks": 16}):
            one = self._base(tokens=512, limit="1GiB" if "width" in shape else "2GiB", **shape)
            peer = self._row(replace(one, kind="deepspeed", overrides=()), "DeepSpeed ZeRO-3, NVMe")
            mine = self._row(one, f"stream, {one.limit}")
            if peer is not None and mine is not None:
                name = f"{mine['parameters']:.2f}B"
                self._report.targets += [
                    Target(f"{name}, time / DeepSpeed's", mine["s/step"] / peer["s/step"], 1 / TWICE),
                    Target(f"{name}, peak / DeepSpeed's", mine["peak MiB"] / peer["peak MiB"], THIRD),
                ]

    def _growth(self) -> None:
        for billions in self._options.billions or (0.25, 0.5, 1.0, 2.0):
            one = self._base(blocks=round((billions * 1e9 - 50e6) / 28.3e6), tokens=512, limit="2GiB")
            self._row(one, f"stream, {one.limit}")

    def _row(self, one: Contestant, name: str, memory: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Run one; None where it has not the memory or the disk, which a note then says."""
        say(f"{name}, {one.blocks} x {one.width}, {one.tokens} tokens ...")
        found = self._figures(one, name)
        if found is None:
            return None
        seconds = statistics.median(found["seconds"])
        floor = max((found["read"] + found["written"]) / self._rates.disk, found["operations"] / self._rates.products)
        row = {
            "": name,
            "parameters": found["parameters"] / 1e9,
            "tokens/step": one.tokens,
            "s/step": seconds,
            "tokens/s": one.tokens / seconds,
            "to memory": memory["s/step"] / seconds if memory is not None else None,
            "waiting": found["waiting"] / sum(found["seconds"]) if one.kind == "stream" else None,
            "peak MiB": found["peak"] / MiB,
            "GB read": found["read"] / 1e9,
            "GB written": found["written"] / 1e9,
            "floor s": floor,
            "of floor": seconds / floor,
            "loss": found["losses"][-1],
        }
        self._report.rows.append(row)
        return row

    def _figures(self, one: Contestant, name: str) -> dict[str, Any] | None:
        files = self._directory / "files"
        files.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": str(one.threads), "TOKENIZERS_PARALLELISM": "false"}
        given = json.dumps(asdict(replace(one, directory=str(files))))
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--contestant", given], env=environment, stdout=subprocess.PIPE, text=True
            )
        finally:
            shutil.rmtree(files)
        if done.returncode:
            self._notes.append(f"{name}, {one.blocks} x {one.width}, {one.tokens} tokens: ended with {done.returncode}")
            return None
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def machine_rates(directory: Path, threads: int, *, tiny: bool) -> Rates:
    """Of the disk (three readers and three writers at once, past the page cache) and of bf16 products."""
    from shardlab.doctor.calibrate import both_ways

    return Rates(both_ways(directory, (64 if tiny else 1024) * MiB), _products_rate(threads, 0.1 if tiny else 2.0))


def _products_rate(threads: int, seconds: float) -> float:
    """The quickest of products shaped as a block's."""
    import torch

    torch.set_num_threads(threads)
    x, weight = torch.ones(512, 1536, dtype=torch.bfloat16), torch.ones(4096, 1536, dtype=torch.bfloat16)
    best = min(_timed(lambda: torch.nn.functional.linear(x, weight), seconds))
    return 2 * 512 * 1536 * 4096 / best


def _timed(trial: Any, seconds: float) -> Iterator[float]:
    ends = time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        trial()
        ended = time.perf_counter()
        yield ended - started
        if ended > ends:
            return


if __name__ == "__main__":
    sys.exit(main())
