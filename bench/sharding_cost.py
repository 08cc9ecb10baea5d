"""What sharding costs in time: training speed at two ranks as a fraction of DDP's on the same work, ours and peers'.

Contestants take turns that rotate: a turn is a start, one step that does not count, then the steps that do; one is in
memory at a time. Ours are compared with our DDP, peers with Accelerate's. On a CPU FSDP2 is torch's `fully_shard` over
gloo (Accelerate turns it into DDP there), ZeRO is DeepSpeed through Accelerate. As in `train_speed.py`, turns are kept
in `--results`, so the figures can be collected in several runs. "CPU of DDP" is the same in CPU seconds of both ranks,
which hardly move with what else the machine does; but a rank that waits for its peer uses none.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contestants import LOOP, OUR_RUN, add_options, take_part
from report import Report, Target
from train_speed import COMMON, keep, take_turn
from turns import Work

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512},
    "138m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 16384,
        "num_attention_heads": 12,
    },
}
OURS: dict[str, Mapping[str, Any]] = {  # the recipe's shard
    "ddp": {"backend": "ddp"},
    "fsdp": {"backend": "fsdp"},
    "fsdp, blocks kept gathered": {"backend": "fsdp", "reshard_after_forward": False},
    "fsdp through gloo": {"backend": "fsdp", "shared_memory": False},
    "zero2": {"backend": "zero2"},
    "zero3": {"backend": "zero3"},
}
PEERS = {"DDP": LOOP, "FSDP2": "torch fully_shard", "ZeRO-2": "Accelerate ZeRO-2", "ZeRO-3": "Accelerate ZeRO-3"}
RANKS, LIMIT = 2, 0.93


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="138m", help="tiny shows only that it runs")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--sequence", type=int, default=512, help="tokens; one sequence for each rank")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--block", type=int, default=3, help="optimizer steps in a turn, after one that does not count")
    parser.add_argument("--names", nargs="*", help="contestants, such as fsdp or FSDP2 [default: all]")
    parser.add_argument("--results", type=Path, default=Path("runs/sharding_cost.jsonl"), help="where turns are kept")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_options(parser)
    options = parser.parse_args()
    if options.contestant is not None:
        return take_part(options)
    names = options.names or [*OURS, *PEERS]
    unknown = [name for name in names if name not in (*OURS, *PEERS)]
    if unknown:
        parser.error(f"no contestant is called {', '.join(unknown)}; there are: {', '.join((*OURS, *PEERS))}")
    for number in range(options.rounds):
        for precision in options.precisions.split(","):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                work = Work(
                    COMMON | MODELS[options.model] | {"tie_word_embeddings": False, "max_position_embeddings": 4096},
                    precision,
                    options.sequence,
                    micro_batch=1,
                    accumulation=1,
                    ranks=RANKS,
                    shard=OURS.get(name, {}),
                )
                turn = take_turn(PEERS.get(name, OUR_RUN), work, options.block)
                keep(options.results, cell(options, precision), name, turn)
    summary(options).print(options.json)
    return 0


def cell(options: argparse.Namespace, precision: str) -> str:
    """What figures of turns can be compared."""
    return f"{options.model} {precision} 1 x {options.sequence}"


def summary(options: argparse.Namespace) -> Report:
    """The table of all turns kept, medians."""
    report = Report(
        f"Sharding's cost, {options.model}, {RANKS} ranks of one thread, one sequence of {options.sequence} each",
        {
            "cell": "",
            "contestant": "",
            "turns": ".0f",
            "tokens/s": ".0f",
            "of DDP": ".3f",
            "CPU s/step": ".2f",
            "CPU of DDP": ".3f",
            "loss": ".5f",
        },
    )
    kept = [json.loads(line) for line in options.results.read_text().splitlines()]
    for precision in options.precisions.split(","):
        here = [turn for turn in kept if turn["cell"] == cell(options, precision)]
        for names, whole, whose in ((OURS, "ddp", "shardlab"), (PEERS, "DDP", "peer's")):
            turns = {name: [turn for turn in here if turn["name"] == name] for name in names}
            rows = {name: _row(turns[name], turns[whole], options) for name in names if turns[name]}
            for name, row in rows.items():
                report.rows.append({"cell": cell(options, precision), "contestant": f"{whose} {name}", **row})
            ours = rows.get("fsdp", {}).get("of DDP")
            if ours is not None:
                report.targets.append(Target(f"{precision}: DDP / fsdp", 1 / ours, 1 / LIMIT))
    return report


def _row(turns: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], options: Any) -> dict[str, Any]:
    def middle(of: Sequence[Mapping[str, Any]], key: str) -> float | None:
        return statistics.median(turn[key] for turn in of) if of else None

    seconds, cpu = middle(turns, "seconds"), middle(turns, "cpu_seconds")
    ddp, ddp_cpu = middle(whole, "seconds"), middle(whole, "cpu_seconds")
    assert seconds is not None
    assert cpu is not None
    return {
        "turns": len(turns),
        "tokens/s": RANKS * options.sequence / seconds,
        "of DDP": None if ddp is None else ddp / seconds,
        "CPU s/step": cpu,
        "CPU of DDP": None if ddp_cpu is None else ddp_cpu / cpu,
        "loss": turns[-1]["loss"],
    }


if __name__ == "__main__":
    sys.exit(main())
