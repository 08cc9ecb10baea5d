"""How time and memory grow with the model, the sequence and the ranks; ours beside an Accelerate loop.

Three series, in each of which one thing grows and the tokens of an optimizer step stay the same. "Of line" is a figure
over the straight line through the series' first two: above 1 growth is faster than a line. Memory is a rank's, with its
libraries; time is also given in CPU seconds of all ranks, which hardly move with what else the machine does. More ranks
than cores wait for each other, which only time shows. Turns are kept in `--results`, as in `train_speed.py`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestants import LOOP, OUR_RUN, add_options, take_part
from report import MiB, Report
from train_speed import COMMON, keep, take_turn
from turns import Work

MODELS: dict[str, dict[str, Any]] = {  # Llama-like, vocabulary 8192, tied
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512},
    "6m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5},
    "30m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8},
    "75m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10},
    "150m": {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 11},
    "300m": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 15},
}
SIZES, SEQUENCES, RANKS = ("6m", "30m", "75m", "150m", "300m"), (256, 512, 1024, 2048, 4096), (1, 2, 4)
TOKENS = 4096  # of an optimizer step
NAMES = (OUR_RUN, LOOP)


@dataclass(frozen=True)
class Cell:
    """One point of a series: `at` is what grows, as a number."""

    series: str
    point: str
    at: float
    work: Work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny shows only that it runs")
    parser.add_argument("--only", default="", help='series whose name has this: "model", "sequence" or "ranks"')
    parser.add_argument("--rounds", type=int, default=1, help="turns of each contestant in each cell")
    parser.add_argument("--block", type=int, default=1, help="optimizer steps in a turn, after one that does not count")
    parser.add_argument("--names", nargs="*", choices=NAMES, default=NAMES, help="contestants [default: both]")
    parser.add_argument("--results", type=Path, default=Path("runs/scaling.jsonl"), help="where turns are kept")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_options(parser)
    options = parser.parse_args()
    if options.contestant is not None:
        return take_part(options)
    chosen = [cell for cell in cells(options.size) if options.only in cell.series]
    for _ in range(options.rounds):
        for cell in chosen:
            for name in options.names:
                keep(options.results, f"{cell.series} {cell.point}", name, take_turn(name, cell.work, options.block))
    summary(chosen, options.results).print(options.json)
    return 0


def cells(size: str) -> list[Cell]:
    """All points, in the order in which they grow."""
    if size == "tiny":
        return [Cell("sequence", str(length), length, _work("tiny", length, 1, 64)) for length in (16, 32, 64)]
    found = [Cell("model", name, _parameters(name), _work(name, 512, 1)) for name in SIZES]
    found += [Cell("sequence", str(length), length, _work("30m", length, 1)) for length in SEQUENCES]
    return found + [Cell("ranks", str(ranks), ranks, _work("30m", 512, ranks)) for ranks in RANKS]


def _work(model: str, sequence: int, ranks: int, tokens: int = TOKENS) -> Work:
    settings = {"vocab_size": 8192, "max_position_embeddings": 4096, **MODELS[model]}
    ours = {"attention": "tiles"}
    return Work(COMMON | settings, "bf16", sequence, 1, tokens // sequence // ranks, ranks, ours=ours)


def _parameters(name: str) -> float:
    """Of the products and the embedding."""
    model = {"vocab_size": 8192, **MODELS[name]}
    hidden = model["hidden_size"]
    block = 4 * hidden**2 + 3 * hidden * model["intermediate_size"]
    return float(model["num_hidden_layers"] * block + hidden * model["vocab_size"])


def summary(chosen: Sequence[Cell], results: Path) -> Report:
    """The table of all turns kept, medians."""
    report = Report(
        "Growth of time and memory with the model, the sequence and the ranks: bf16, two cores",
        {
            "series": "", "point": "", "contestant": "", "turns": ".0f", "ms/token": ".3f", "of line": ".2f",
            "CPU ms/token": ".3f", "CPU of line": ".2f", "peak MiB": ",.0f", "MiB of line": ".2f",
        },
    )  # fmt: skip
    kept = [json.loads(line) for line in results.read_text().splitlines()]
    for series in dict.fromkeys(cell.series for cell in chosen):
        for name in NAMES:
            points = [cell for cell in chosen if cell.series == series]
            found = [(cell, row) for cell in points if (row := _row(cell, name, kept)) is not None]
            for column, beside in (
                ("ms/token", "of line"),
                ("CPU ms/token", "CPU of line"),
                ("peak MiB", "MiB of line"),
            ):
                line = _line([(cell.at, row[column]) for cell, row in found[:2]])
                for cell, row in found[2:]:
                    row[beside] = row[column] / line(cell.at)
            report.rows.extend(row for _, row in found)
    return report


def _row(cell: Cell, name: str, kept: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    turns = [turn for turn in kept if turn["cell"] == f"{cell.series} {cell.point}" and turn["name"] == name]
    if not turns:
        return None
    middle = {key: statistics.median(turn[key] for turn in turns) for key in ("seconds", "cpu_seconds", "peak_bytes")}
    return {
        "series": cell.series,
        "point": cell.point,
        "contestant": name,
        "turns": len(turns),
        "ms/token": middle["seconds"] / cell.work.tokens * 1e3,
        "CPU ms/token": middle["cpu_seconds"] / cell.work.tokens * 1e3,
        "peak MiB": middle["peak_bytes"] / MiB,
    }


def _line(points: Sequence[tuple[float, float]]) -> Any:
    """Through two points."""
    if len(points) < 2:
        return lambda at: float("nan")
    (x, y), (u, v) = points
    return lambda at: y + (v - y) * (at - x) / (u - x)


if __name__ == "__main__":
    sys.exit(main())
