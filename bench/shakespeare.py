"""A small character model of Shakespeare's plays: loss on held-out text and wall time, beside a hand-written script.

The setting that nanoGPT's README publishes for a CPU (4 layers, 4 heads, 128 wide, context 64, batch 12, 2000 steps,
no dropout; the first 90% of the text to train on). Ours is `shardlab train` on a recipe and a GPT-2 config, as a user
runs it. The peer is a training loop of the kind people write by hand, in this file. Both are scored on the whole of the
held-out text in rows of 64 characters, both run with the same number of threads, one after the other.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from report import Report, Target, say

if TYPE_CHECKING:
    from torch import Tensor

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
LEARNING_RATE, FINAL_FRACTION, WARMUP, BETAS, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 100, (0.9, 0.99), 0.1, 1.0
LOSS_LIMIT = 1.89  # nats per character
OURS, PEER = "shardlab train", "hand-written loop"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the text, tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)  # the peer's own process: where its parts lie
    options = parser.parse_args()
    if options.peer is not None:
        print(json.dumps(hand_written(options.peer, options)))
        return 0
    if not options.data.is_file():
        print(f"error: {options.data} is missing: give the text of the plays with --data", file=sys.stderr)
        return 2
    compare(options).print(options.json)
    return 0


def compare(options: argparse.Namespace) -> Report:
    """Train with both, and set their figures side by side."""
    report = Report(
        f"Shakespeare by characters: {LAYERS} layers, {WIDTH} wide, context {CONTEXT}, batch {BATCH}, "
        f"{options.steps} steps, {options.precision}, {options.threads} threads",
        {
            "": "",
            "validation loss": ".4f",
            "characters": ",.0f",
            "wall s": ".1f",
            "steps alone s": ".1f",
            "CPU s": ".1f",
        },
        notes=["Wall and CPU: the whole command, from start to end, scoring the held-out text included."],
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_parts(options.data, directory)
        for contestant, run in ((PEER, run_peer), (OURS, run_ours)):
            say(f"{contestant} ...")
            started, cpu_before = time.perf_counter(), _children_cpu_seconds()
            figures = run(directory, options)
            wall, cpu = time.perf_counter() - started, _children_cpu_seconds() - cpu_before
            report.rows.append({"": contestant, **figures, "wall s": wall, "CPU s": cpu})
    peer, ours = report.rows
    report.targets = [
        Target(f"{OURS}, validation loss", ours["validation loss"], LOSS_LIMIT),
        Target(f"{OURS} / {PEER}, wall", ours["wall s"] / peer["wall s"], 1.0),
    ]
    return report


def _children_cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def write_parts(data: Path, directory: Path) -> None:
    """The first 90% of the text, and the rest."""
    text = data.read_text(encoding="utf-8")
    cut = int(len(text) * 0.9)
    (directory / "train.txt").write_text(text[:cut], encoding="utf-8")
    (directory / "validation.txt").write_text(text[cut:], encoding="utf-8")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(options.threads)}


def run_ours(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """`shardlab train`, on one process."""
    (directory / "gpt2.json").write_text(json.dumps(_config()))
    (directory / "shakespeare.yaml").write_text(json.dumps(_recipe(options)))  # JSON is YAML
    command = [sys.executable, "-m", "shardlab", "train", "shakespeare.yaml", "--output", "run", "--json"]
    done = subprocess.run(
        command, cwd=directory, env=_environment(options), stdout=subprocess.PIPE, text=True, check=True
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    return {
        "validation loss": summary["evaluation_loss"],
        "characters": summary["evaluation_tokens"],
        "steps alone s": _step_seconds(directory / "run" / "metrics.jsonl"),
    }


def _step_seconds(metrics: Path) -> float:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return sum(float(row["seconds"]) for row in rows if "seconds" in row)


def _config() -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "n_positions": CONTEXT,
        "vocab_size": 257,  # of the bytes tokenizer
        "activation_function": "gelu",  # the fused one, as the peer has it
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    undecayed = [{"pattern": pattern, "weight_decay": 0.0} for pattern in ("*.bias", "*.ln_*.weight")]
    return {
        "model": {"config": "gpt2.json"},
        "data": {
            "files": ["train.txt"],
            "evaluation_files": ["validation.txt"],
            "tokenizer": "bytes",
            "sequence_length": CONTEXT,
            "cache_dir": "cache",
        },
        "train": {
            "steps": options.steps,
            "global_batch_size": BATCH,
            "optimizer": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "weight_decay": WEIGHT_DECAY,
                "groups": undecayed,
            },
            "schedule": {"name": "cosine", "warmup_steps": WARMUP, "final_fraction": FINAL_FRACTION},
            "precision": options.precision,
            "clip_grad_norm": CLIP,
            "seed": options.seed,
        },
        "shard": {"micro_batch": BATCH},
    }


def run_peer(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """The hand-written loop, in a process of its own."""
    own = ["--data", str(options.data), "--peer", str(directory), "--steps", str(options.steps)]
    own += ["--precision", options.precision, "--seed", str(options.seed)]
    command = [sys.executable, __file__, *own]
    done = subprocess.run(command, env=_environment(options), stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def hand_written(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """The peer: random crops, fused AdamW, a warm-up and half a cosine, and nothing that is not needed."""
    import torch

    torch.manual_seed(options.seed)
    texts = [(directory / f"{part}.txt").read_text(encoding="utf-8") for part in ("train", "validation")]
    index = {character: i for i, character in enumerate(sorted(set("".join(texts))))}
    train, held_out = (torch.tensor([index[character] for character in text]) for text in texts)
    model = _gpt(len(index))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    started = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, options.steps)
        starts = torch.randint(len(train) - CONTEXT, (BATCH,))
        rows = torch.stack([train[start : start + CONTEXT + 1] for start in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - started
    loss, characters = _score(model, held_out, options)
    return {"validation loss": loss, "characters": characters, "steps alone s": seconds}


def _rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    left = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - 1 - WARMUP)))
    return LEARNING_RATE * (FINAL_FRACTION + (1 - FINAL_FRACTION) * left)


def _score(model: Any, text: "Tensor", options: argparse.Namespace) -> tuple[float, int]:
    """Mean loss over all of `text` in rows of CONTEXT characters, of which each sees only its own row."""
    import torch

    count = (len(text) - 1) // CONTEXT
    inputs = text[: count * CONTEXT].view(count, CONTEXT)
    targets = text[1 : count * CONTEXT + 1].view(count, CONTEXT)
    total = 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
        for some, wanted in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            total += float(model(some, wanted)) * some.numel()
    return total / (count * CONTEXT), count * CONTEXT


def _gpt(vocabulary: int) -> Any:
    """A decoder like GPT-2: fused query, key and value, pre-norm, a head tied to the embedding."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, hidden: "Tensor") -> "Tensor":
            batch, length, _ = hidden.shape
            parts = self.query_key_value(self.before_attention(hidden)).split(WIDTH, dim=2)
            # each (batch, heads, length, width of a head)
            query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            return hidden + self.down(functional.gelu(self.up(self.before_mlp(hidden))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.last_norm = nn.LayerNorm(WIDTH)
            for name, parameter in self.named_parameters():
                if parameter.dim() >= 2:  # the outputs of residual branches smaller, by the number of branches
                    scale = math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1.0
                    nn.init.normal_(parameter, std=0.02 / scale)
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)

        def forward(self, inputs: "Tensor", targets: "Tensor") -> "Tensor":
            hidden = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
            for block in self.blocks:
                hidden = block(hidden)
            logits = functional.linear(self.last_norm(hidden), self.tokens.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return GPT()


if __name__ == "__main__":
    sys.exit(main())
