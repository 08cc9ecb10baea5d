"""Tokens per second of a whole training step, beside the HF Trainer and an Accelerate loop, and to the GEMM bound.

The bound is what the same cores would train if nothing but matrix products took time: the rate of a block's largest
product, measured in every turn just before its steps, over the model's floating-point operations for each token. So
"of bound" can be compared between turns, and between machines.

Contestants take turns that rotate: a turn is a start, one step that does not count, then the steps that do. Only one is
in memory at a time. Every turn is kept in `--results` as it ends, and the table is of all that is there: so the figures
can be collected in several runs, of a few minutes each, while a machine is quiet. CPU seconds are of all threads and
ranks; on a busy machine only they are worth reading, and two threads that wait for each other spoil even those.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants import LOOP, OUR_RUN, TRAINER, add_options, our_engine, take_part
from report import MiB, Report, Target, say
from turns import Contestant, Turn, Work

MODELS: dict[str, dict[str, Any]] = {  # tied
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512},
    "150m": {  # 152M parameters
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "vocab_size": 32000,
        "num_attention_heads": 12,
    },
}
COMMON = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True}
SEQUENCE, ROWS, MICRO_BATCHES = 512, 2, (1, 8)
TILES, COMPILED = f"{OUR_RUN}, tiles", f"{OUR_RUN}, tiles, compiled"
KEPT, BOTH = f"{TILES}, freed kept", f"{TILES}, freed kept, compiled"
_TILES, _KEPT, _COMPILED = (
    {"ours": {"attention": "tiles"}},
    {"shard": {"keep_freed": True}},
    {"train": {"compile": True}},
)
WAYS: dict[str, dict[str, Any]] = {
    OUR_RUN: {},
    TILES: _TILES,
    KEPT: _TILES | _KEPT,
    COMPILED: _TILES | _COMPILED,
    BOTH: _TILES | _KEPT | _COMPILED,
}
NAMES = (*WAYS, TRAINER, LOOP)
PROFILED = 16  # operators shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="150m", help="tiny shows only that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant in each cell")
    parser.add_argument("--block", type=int, default=2, help="optimizer steps in a turn, after one that does not count")
    parser.add_argument("--only", default="", help='cells whose name has this, such as "bf16 2 x 512"')
    parser.add_argument("--names", nargs="*", choices=NAMES, default=NAMES, help="contestants [default: all]")
    parser.add_argument("--results", type=Path, default=Path("runs/train_speed.jsonl"), help="where turns are kept")
    parser.add_argument("--profile", action="store_true", help="of ours alone: where a step's CPU time goes")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_options(parser)
    options = parser.parse_args()
    if options.contestant is not None:
        return take_part(options)
    chosen = {name: work for name, work in cells(options.model).items() if options.only in name}
    if not chosen:
        parser.error(f"no cell has {options.only!r} in its name; there are: {', '.join(cells(options.model))}")
    if options.profile:
        for name, work in chosen.items():
            if work.ranks == 1:
                print(f"{name}\n{profile(work)}", flush=True)
        return 0
    for number in range(options.rounds):
        for cell, work in chosen.items():
            first = number % len(options.names)
            for name in [*options.names[first:], *options.names[:first]]:
                keep(options.results, cell, name, take_turn(name, work, options.block))
    summary(options, chosen).print(options.json)
    return 0


def cells(model: str) -> dict[str, Work]:
    """Work by name: the same sequences on one process with two threads and on two ranks with one each."""
    found = {}
    for precision in ("bf16", "fp32"):
        for count in MICRO_BATCHES:
            for ranks in (1, 2):
                rows = ROWS if count > 1 else ROWS // ranks
                work = Work(
                    COMMON | MODELS[model], precision, SEQUENCE, rows, ROWS * count // (rows * ranks), ranks, bound=True
                )
                batch = f"{count} x {ROWS} x {SEQUENCE}" if count > 1 else f"{ROWS} x {SEQUENCE}"
                found[f"{model} {precision} {batch}, {ranks} rank{'s' * (ranks > 1)}"] = work
    return found


def take_turn(name: str, work: Work, block: int) -> Turn:
    """Start a contestant, let it warm up, measure it, end it."""
    ours = WAYS.get(name)
    if ours is not None:
        name, work = OUR_RUN, Work(**{**vars(work), **ours})
    contestant = Contestant(name, work, threads=2 // work.ranks, block=1)
    try:
        contestant.ready()
        contestant.turn()
        turns = [contestant.turn() for _ in range(block)]
    finally:
        contestant.close()
    middle = {key: statistics.fmean(getattr(turn, key) for turn in turns) for key in vars(turns[0]) if key != "loss"}
    return Turn(**middle, loss=turns[-1].loss)


def keep(results: Path, cell: str, name: str, turn: Turn) -> None:
    """Append a turn to the file of results."""
    say(f"{cell}, {name}: {turn.seconds:.2f} s a step, {turn.cpu_seconds:.2f} of CPU")
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps({"cell": cell, "name": name, **vars(turn)}) + "\n")


def flop_per_token(work: Work) -> float:
    """Forward and backward: six for each weight of a product, and causal attention."""
    model = work.model
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    weights = layers * (4 * hidden**2 + 3 * hidden * model["intermediate_size"]) + hidden * model["vocab_size"]
    return 6.0 * weights + 6.0 * layers * hidden * work.sequence


def summary(options: argparse.Namespace, chosen: dict[str, Work]) -> Report:
    """The table of all turns kept, medians."""
    report = Report(
        f"Training speed, {options.model}, sequence {SEQUENCE}, two cores, micro-batches of {ROWS} in all",
        {
            "cell": "",
            "contestant": "",
            "turns": ".0f",
            "tokens/s": ".0f",
            "of bound": ".2f",
            "tokens/CPU s": ".1f",
            "of CPU bound": ".2f",
            "CPU to Trainer": ".2f",
            "peak MiB": ",.0f",
            "loss": ".4f",
        },
        notes=[
            "peak: of the larger rank, with its libraries",
            "of CPU bound: the same in CPU seconds; CPU to Trainer: tokens per CPU second over the Trainer's",
        ],
    )
    kept = [json.loads(line) for line in options.results.read_text().splitlines()]
    for cell, work in chosen.items():
        turns: dict[str, Sequence[dict[str, Any]]] = {
            name: [turn for turn in kept if turn["cell"] == cell and turn["name"] == name] for name in NAMES
        }
        rows = {name: _row(cell, name, found, work) for name, found in turns.items() if found}
        trainer = rows.get(TRAINER, {}).get("tokens/CPU s")
        for row in rows.values():
            row["CPU to Trainer"] = row["tokens/CPU s"] / trainer if trainer else None
            report.rows.append(row)
        for what, names, limit in (("", (OUR_RUN, TILES, KEPT), 0.80), (" compiled", (COMPILED, BOTH), 0.88)):
            found = [rows[name] for name in names if name in rows]
            if found:
                best = max(found, key=lambda row: float(row["of bound"]))
                report.targets.append(Target(f"{cell}: bound / ours{what}", 1 / best["of bound"], 1 / limit))
                if TRAINER in rows and not what:
                    times = rows[TRAINER]["tokens/s"] / best["tokens/s"]
                    report.targets.append(Target(f"{cell}: Trainer / ours", times, 1 / 1.4))
    return report


def _row(cell: str, name: str, turns: Sequence[dict[str, Any]], work: Work) -> dict[str, Any]:
    flop = flop_per_token(work) * work.tokens
    return {
        "cell": cell,
        "contestant": name,
        "turns": len(turns),
        "tokens/s": statistics.median(work.tokens / turn["seconds"] for turn in turns),
        "of bound": statistics.median(flop / turn["seconds"] / turn["products"] for turn in turns),
        "tokens/CPU s": statistics.median(work.tokens / turn["cpu_seconds"] for turn in turns),
        "of CPU bound": statistics.median(flop / turn["cpu_seconds"] / turn["cpu_products"] for turn in turns),
        "peak MiB": statistics.median(turn.get("peak_bytes", 0.0) for turn in turns) / MiB,
        "loss": turns[-1]["loss"],
    }


def profile(work: Work) -> str:
    """Operators of one of our steps by their own CPU time; tiles, one thread, so that no time is spent waiting."""
    import tempfile

    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.set_num_threads(1)
    work = Work(**{**vars(work), "ours": {"attention": "tiles"}})
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        config.write_text(json.dumps(work.model))
        engine, loader = our_engine(work, config)
        windows = iter(loader)
        engine.run(next(windows))
        with record(activities=[ProfilerActivity.CPU]) as found:
            engine.run(next(windows))
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=PROFILED, max_name_column_width=40))


if __name__ == "__main__":
    sys.exit(main())
