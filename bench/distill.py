"""What a teacher is worth: a student of half the layers, the same steps, with it and without, seed by seed.

A teacher is trained on the standard library's source. Its blocks of most influence are the student, which is trained
on by `shardlab distill`, from the same weights and by the same rows each time, once with the teacher's scores in the
loss and once by cross-entropy alone. Both are judged by held-out text. `--loss-memory` measures the loss itself: in
the head's chunks beside both models' logits whole, in turns.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Report, Target, say

MODELS = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1m": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "6m": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8},
}
SHAPE = (2048, 32000, 768)  # tokens, vocabulary, hidden size of the loss's own measurement


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(MODELS), default="6m")
    parser.add_argument("--tokenizer", default="bpe-8k")
    parser.add_argument("--teacher-steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300, help="of the student")
    parser.add_argument("--rows", type=int, default=16, help="in a step")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=128, help="rows")
    parser.add_argument("--directory", type=Path, help="keep what is made, and take up what is there")
    parser.add_argument("--loss-memory", action="store_true", help="the loss alone")
    parser.add_argument("--turns", type=int, default=3, help="of --loss-memory")
    parser.add_argument("--tokens", type=int, default=SHAPE[0], help="of --loss-memory")
    parser.add_argument("--one-loss", choices=("chunks", "whole"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args()
    if options.one_loss is not None:
        print(json.dumps(one_loss(options.one_loss, options.tokens)))
        return 0
    if options.loss_memory:
        loss_memory(options).print(options.json)
        return 0
    with tempfile.TemporaryDirectory() as name:
        worth(options, options.directory or Path(name)).print(options.json)
    return 0


def worth(options: argparse.Namespace, directory: Path) -> Report:
    """Teacher, student, and both ways of training it, for each seed."""
    report = Report(
        f"Distillation: {options.size}, half of its blocks, {options.steps} steps of {options.rows} x "
        f"{options.sequence}, weight {options.weight:g}, temperature {options.temperature:g}; the teacher's own steps: "
        f"{options.teacher_steps}",
        {"": "", "with": ".3f", "without": ".3f", "with / without": ".4f", "KL with": ".4f", "KL without": ".4f"},
    )
    directory.mkdir(parents=True, exist_ok=True)
    teacher = trained_teacher(options, directory)
    for seed in range(options.seeds):
        with_, without = (student(options, directory, teacher, seed, weight) for weight in (options.weight, 0.0))
        ours, plain = (figures["perplexity"]["after"] for figures in (with_, without))
        report.rows.append(
            {
                "": f"seed {seed}: perplexity",
                "with": ours,
                "without": plain,
                "with / without": ours / plain,
                "KL with": with_["kl_divergence"],
                "KL without": without["kl_divergence"],
            }
        )
    cut = json.loads((directory / "student-0-0-student" / "shardlab_card.json").read_text())
    ratios = [row["with / without"] for row in report.rows]
    report.targets = [Target("perplexity with the teacher / without, the worst seed", max(ratios), 1.0)]
    losses = [math.log(row[name]) for name in ("without", "with") for row in report.rows]
    own = math.log(with_["perplexity"]["before"])
    plain_gap, ours_gap = (statistics.mean(part) - own for part in (losses[: options.seeds], losses[options.seeds :]))
    report.notes = [
        f"teacher: perplexity {with_['perplexity']['before']:.3f}; cut to half, not yet trained: "
        f"{cut['figures']['perplexity']['after']:.3f}; {with_['held_out_tokens']:,} held-out tokens",
        f"loss above the teacher's, mean of the seeds: {plain_gap:.4f} without, {ours_gap:.4f} with "
        f"({1 - ours_gap / plain_gap:.1%} of the gap)",
    ]
    return report


def trained_teacher(options: argparse.Namespace, directory: Path) -> Path:
    """Trained here, unless it lies there."""
    (directory / "teacher.json").write_text(json.dumps(config(options.size)))
    run = directory / "teacher"
    if not (run / "model").is_dir():
        recipe = write_recipe(options, directory, options.teacher_steps, seed=0)
        changes = [f"model.config={directory / 'teacher.json'}", "model.preset=null"]
        shardlab("train", recipe, "--output", run, *(f"--set={one}" for one in changes))
    return run / "model"


def student(options: argparse.Namespace, directory: Path, teacher: Path, seed: int, weight: float) -> dict[str, Any]:
    """The card's figures of one student."""
    output = directory / f"student-{seed}-{weight:g}"
    if not (output / "model" / "shardlab_card.json").is_file():
        recipe = write_recipe(options, directory, options.steps, seed=seed)
        half = MODELS[options.size]["num_hidden_layers"] // 2
        named = {"layers": half, "recipe": recipe, "weight": weight, "temperature": options.temperature}
        named |= {"held-out": options.held_out}
        shardlab("distill", teacher, output, *(f"--{key}={value}" for key, value in named.items()))
    figures: dict[str, Any] = json.loads((output / "model" / "shardlab_card.json").read_text())["figures"]
    return figures


def config(size: str) -> dict[str, Any]:
    """A Llama with one key and value head for two queries."""
    sizes = MODELS[size]
    heads = sizes["num_attention_heads"]
    return {
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


def write_recipe(options: argparse.Namespace, directory: Path, steps: int, *, seed: int) -> Path:
    """The same text and rate for all; the schedule is that of `steps`."""
    tree = {
        "data": {
            "tokenizer": options.tokenizer,
            "sequence_length": options.sequence,
            "evaluation_fraction": 0.005,
        },
        "train": {
            "steps": steps,
            "global_batch_size": options.rows,
            "precision": options.precision,
            "seed": seed,
            "schedule": {"warmup_steps": min(20, steps // 10)},
        },
        "checkpoint": {"every": None},
    }
    path = directory / f"recipe-{steps}-{seed}.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def shardlab(*arguments: Any) -> None:
    """The command, as a user runs it."""
    command = [sys.executable, "-m", "shardlab", *map(str, arguments)]
    say(" ".join(command[1:]))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")


def loss_memory(options: argparse.Namespace) -> Report:
    """Each in a process of its own, in turns."""
    tokens, (_, vocabulary, hidden) = options.tokens, SHAPE
    report = Report(
        f"Forward KL of {tokens} tokens, vocabulary {vocabulary}, {hidden} wide, fp32, one thread",
        {"": "", "extra peak MiB": ",.0f", "CPU s": ".2f", "loss": ".6f"},
    )
    found: dict[str, list[dict[str, float]]] = {"chunks": [], "whole": []}
    for _ in range(options.turns):
        for kind, results in found.items():
            command = [sys.executable, __file__, "--one-loss", kind, "--tokens", str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout))
    for kind, results in found.items():
        middle = {key: statistics.median(one[key] for one in results) for key in results[0]}
        name = "HeadLoss, in chunks" if kind == "chunks" else "both models' logits whole"
        report.rows.append({"": name, **middle})
    ours, whole = report.rows
    report.targets = [
        Target("extra memory, chunks / whole", ours["extra peak MiB"] / whole["extra peak MiB"], 0.3),
        Target("CPU time, chunks / whole", ours["CPU s"] / whole["CPU s"], 1.0),
    ]
    return report


def one_loss(kind: str, tokens: int) -> dict[str, float]:
    """One forward and backward pass of the loss alone; the hidden states and both heads are there before."""
    import torch
    from torch import nn

    from shardlab.model.divergence import Divergence
    from shardlab.model.head import HeadLoss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, vocabulary, hidden = SHAPE
    states, theirs = torch.randn(1, tokens, hidden, requires_grad=True), torch.randn(tokens, hidden)
    targets = torch.randint(0, vocabulary, (1, tokens))
    head, teacher = (nn.Linear(hidden, vocabulary, bias=False) for _ in range(2))
    for linear in (head, teacher):
        nn.init.normal_(linear.weight, std=0.02)
    measure = Divergence("forward_kl", 2.0)

    class Said:
        weight = 0.5

        def divergence(self, rows: slice, scores: Any, *, differentiate: bool) -> Any:
            with torch.no_grad():
                return measure(scores, teacher(theirs[rows]), differentiate=differentiate)

    module = HeadLoss([], head)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if kind == "chunks":
        loss = module(states, targets, float(tokens), Said())
    else:
        scores = head(states).flatten(0, 1)
        with torch.no_grad():
            said = teacher(theirs)
        hard = nn.functional.cross_entropy(scores, targets.flatten(), reduction="sum")
        first, second = ((one / 2.0).log_softmax(-1) for one in (said, scores))
        soft = nn.functional.kl_div(second, first, reduction="sum", log_target=True) * 4
        loss = (0.5 * hard + 0.5 * soft) / tokens
    loss.backward()
    after, ended = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    return {"extra peak MiB": (after - before) / 1024, "CPU s": ended - started, "loss": loss.item()}


if __name__ == "__main__":
    raise SystemExit(main())
