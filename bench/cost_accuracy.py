"""Predicted seconds of an optimizer step beside the measured ones, and whether the fastest is the foreseen one.

Each cell is a run of `shardlab train` on random weights, its figure the median of the steps after the first two.
Predictions are by the calibration of this machine: run `shardlab doctor --calibrate` first, for without it they are by
another machine's figures, and the report says so.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cells import Cell
from kept import Kept
from report import Report, Target

from shardlab.planner import calibration

WITHIN = {calibration.MEASURED: calibration.MEASURED_ERROR, calibration.OTHERS: calibration.OTHERS_ERROR}
CELLS = (
    Cell("llama", "ddp", ranks=1),
    Cell("llama", "ddp", ranks=1, precision="bf16", micro_batch=4),
    Cell("llama", "ddp", ranks=1, recompute="full", micro_batch=4),
    Cell("llama", "ddp", ranks=1, accumulation=4),
    Cell("gpt2", "ddp", ranks=1),
    Cell("llama-64k", "ddp", ranks=1),
    *(Cell("llama", backend, micro_batch=4) for backend in ("ddp", "zero1", "zero2", "fsdp", "zero3")),
    *(Cell("llama", backend, accumulation=4) for backend in ("ddp", "zero2", "fsdp")),
    *(Cell("llama", backend, precision="bf16", micro_batch=4) for backend in ("ddp", "fsdp")),
    Cell("qwen2", "fsdp", recompute="full", micro_batch=4),
)
TINY = (Cell("tiny", "ddp", ranks=1),)


@dataclass(frozen=True)
class Group:
    """Cells that do the same work, of which a plan would choose one."""

    ranks: int
    precision: str
    sequences: int
    model: str

    @classmethod
    def of(cls, cell: Cell) -> "Group":
        return cls(cell.ranks, cell.precision, cell.micro_batch * cell.accumulation, cell.model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("30m", "tiny"), default="30m", help="tiny shows only that it runs")
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first two are not timed")
    parser.add_argument("--only", default="", help="cells whose line contains this, such as zero3 or bf16")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep rows there; cells in it are not run again")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args()
    chosen = [cell for cell in (TINY if options.size == "tiny" else CELLS) if options.only in str(cell)]
    kept = Kept(options.results)
    measure(chosen, options.steps, kept).print(options.json)
    return 1 if kept.failed else 0


def measure(chosen: list[Cell], steps: int, kept: Kept) -> Report:
    """Run every cell that is not among `kept`, one after another."""
    source = calibration.MEASURED if calibration.read() is not None else calibration.OTHERS
    report = Report(
        "Predicted and measured seconds of an optimizer step",
        {"cell": "", "measured s": ".3f", "predicted s": ".3f", "predicted / measured": ".2f", "load": ".1f"},
        notes=[f"rates: {source}"],
    )
    done: list[Cell] = []
    for cell in chosen:
        row = kept.row(str(cell), partial(_row, cell, steps, source))
        if row is not None:
            done.append(cell)
            report.rows.append(row)
    report.notes = [*report.notes, *_others(report.rows, source), *(f"failed: {one}" for one in kept.failed)]
    if not report.rows:
        return report
    off = sorted(abs(math.log(row["predicted / measured"])) for row in report.rows)
    report.targets = [
        Target("share of cells further off than stated", _outside(report.rows, WITHIN[source]), 0.1),
        Target("median factor between predicted and measured", math.exp(off[len(off) // 2]), 1 + WITHIN[source]),
    ]
    lost = _lost(done, report.rows)
    if lost is not None:
        report.targets.append(Target("time of the plan foreseen as fastest, by the fastest's, at worst", lost, 1.1))
    return report


def _row(cell: Cell, steps: int, source: str) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        summary = cell.train(Path(directory), steps)
    measured, predicted = summary["seconds_per_step"], summary["predicted_seconds_per_step"]
    return {
        "measured s": measured,
        "predicted s": predicted,
        "predicted / measured": predicted / measured,
        "load": load,
        "rates": source,
    }


def _others(rows: Sequence[Mapping[str, Any]], source: str) -> list[str]:
    """Rows that were kept from before this machine was calibrated can't stand beside those after."""
    other = [str(row["cell"]) for row in rows if row["rates"] != source]
    return [f"predicted by other rates: {', '.join(other)}"] if other else []


def _outside(rows: list[Any], error: float) -> float:
    return sum(abs(row["predicted / measured"] - 1) > error for row in rows) / len(rows)


def _lost(cells: list[Cell], rows: list[Any]) -> float | None:
    """By how much the choice by prediction is slower than the best choice, in the group where that is worst."""
    groups: dict[Group, list[Any]] = {}
    for cell, row in zip(cells, rows, strict=True):
        groups.setdefault(Group.of(cell), []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    return max(
        (
            min(group, key=lambda row: row["predicted s"])["measured s"] / min(row["measured s"] for row in group)
            for group in several
        ),
        default=None,
    )


if __name__ == "__main__":
    sys.exit(main())
