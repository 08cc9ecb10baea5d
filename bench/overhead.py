"""Step time of the engine beside a hand-written Accelerate loop and the Hugging Face Trainer.

The same model, data, batch, optimizer, clipping and precision; one process with two threads for each contestant. They
take turns: a few steps of one while the others sleep, then of the next, in an order that rotates. So what else the
machine does hits them alike, and a ratio is the median over rounds of (its time / the Accelerate loop's in that round).
CPU time is given beside it: of all threads, and hardly moved by other programs where a contestant has one thread.

Each contestant has its own process in the state that its user would have: ours sets the allocator for itself, peers
are left as they are (`--same-allocator` gives them our settings). bf16: ours is a bf16 copy of the weights, theirs is
autocast. The loss shows that loop and engine do the same work: from the same weights, over the same batches.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contestants import LOOP, OUR_LOOP, OUR_RUN, TRAINER, add_options, take_part
from report import Report, Target, say
from turns import Contestant, Turn, Work

MODELS: dict[str, dict[str, Any]] = {  # tied
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512},
    "6m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5, "vocab_size": 8192},
    "34m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 16384},
}
COMMON = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True}
SEQUENCE, MICRO_BATCH, ACCUMULATION = 256, 4, 2
WARM_ROUNDS = 2
NAMES = (LOOP, TRAINER, OUR_RUN, OUR_LOOP)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="6m,34m", help=f"separated by commas, of {', '.join(MODELS)}")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contestant that count")
    parser.add_argument("--block", type=int, default=2, help="optimizer steps in a turn")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant")
    parser.add_argument("--same-allocator", action="store_true", help="give the peers our allocator settings")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_options(parser)
    options = parser.parse_args()
    if options.contestant is not None:
        return take_part(options)
    report = Report(
        f"Step time beside Accelerate and the Trainer: sequence {SEQUENCE}, micro-batch {MICRO_BATCH}, "
        f"accumulation {ACCUMULATION}, {options.threads} threads, {options.rounds} turns of {options.block} steps",
        {
            "model": "",
            "precision": "",
            "contestant": "",
            "ms/step": ".1f",
            "tokens/s": ".0f",
            "to loop": ".3f",
            "CPU ms/step": ".1f",
            "CPU to loop": ".3f",
            "loss": ".5f",
        },
    )
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            add_case(report, model, precision, options)
    report.print(options.json)
    return 0


def add_case(report: Report, model: str, precision: str, options: argparse.Namespace) -> None:
    """Measure all contestants on one model in one precision."""
    say(f"{model} {precision} ...")
    rounds = alternate(model, precision, options)
    for name in NAMES:
        seconds = statistics.median(turn[name].seconds for turn in rounds)
        report.rows.append(
            {
                "model": model,
                "precision": precision,
                "contestant": name,
                "ms/step": seconds * 1e3,
                "tokens/s": SEQUENCE * MICRO_BATCH * ACCUMULATION / seconds,
                "to loop": ratio(rounds, name, LOOP),
                "CPU ms/step": statistics.median(turn[name].cpu_seconds for turn in rounds) * 1e3,
                "CPU to loop": statistics.median(turn[name].cpu_seconds / turn[LOOP].cpu_seconds for turn in rounds),
                "loss": rounds[-1][name].loss,
            }
        )
    report.targets += [
        Target(f"{model} {precision}, {OUR_RUN} / {LOOP}", ratio(rounds, OUR_RUN, LOOP), 1.03),
        Target(f"{model} {precision}, {OUR_RUN} / {TRAINER}", ratio(rounds, OUR_RUN, TRAINER), 1.0),
    ]


def ratio(rounds: Sequence[Mapping[str, Turn]], name: str, other: str) -> float:
    """The median over rounds of (step time of `name` / of `other`)."""
    return statistics.median(turn[name].seconds / turn[other].seconds for turn in rounds)


def alternate(model: str, precision: str, options: argparse.Namespace) -> list[dict[str, Turn]]:
    """Let the contestants take turns; the rounds that count."""
    work = Work(COMMON | MODELS[model], precision, SEQUENCE, MICRO_BATCH, ACCUMULATION)
    environment = ALLOCATOR if options.same_allocator else {}
    rounds: list[dict[str, Turn]] = []
    there: dict[str, Contestant] = {}
    try:
        for name in NAMES:
            there[name] = Contestant(name, work, threads=options.threads, block=options.block, environment=environment)
        for contestant in there.values():
            contestant.ready()
        for number in range(WARM_ROUNDS + options.rounds):
            first = number % len(NAMES)
            rounds.append({name: there[name].turn() for name in NAMES[first:] + NAMES[:first]})
    finally:
        for contestant in there.values():
            contestant.close()
    return rounds[WARM_ROUNDS:]


if __name__ == "__main__":
    sys.exit(main())
