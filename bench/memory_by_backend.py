"""Peak memory of a rank by backend, beside torch's DistributedDataParallel.

Each contestant runs in processes of its own, two ranks, started alike: one thread per rank, the same allocator
settings, the same libraries imported before memory is first read. Peak: anonymous and shared pages, the highest over
the second and third step (the first makes the optimizer's state), above what the libraries hold before the model.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import MiB, Report, Target, say

SIZES: dict[str, dict[str, Any]] = {
    "150m": {  # 138M parameters
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 16384,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
}
COMMON = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False}
PEERS = {"DDP, for-each AdamW": "foreach", "DDP, default AdamW": "default", "DDP, fused AdamW": "fused"}
OURS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
LIMITS = {"fsdp": 0.52, "zero1": 0.66, "zero2": 0.66, "zero3": 0.66}
RANKS, STEPS, MEASURED_FROM = 2, 3, 1  # the steps measured are those after the first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150m", help="model; tiny shows only that it runs")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sequence, one sequence per micro-batch")
    parser.add_argument("--backends", default=",".join(OURS), help="ours, separated by commas")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # a rank's own process
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        from shardlab.runtime.child import run_rank

        return run_rank(lambda: measure(options))
    compare(options).print(options.json)
    return 0


def compare(options: argparse.Namespace) -> Report:
    """Run every contestant, one after another."""
    report = Report(
        f"Peak memory of a rank above the libraries' base: {options.size}, {RANKS} ranks, fp32, "
        f"sequence {options.sequence}, micro-batch 1",
        {"": "", "base MiB": ".0f", "peak MiB": ".0f", "to for-each DDP": ".3f", "to fused DDP": ".3f", "loss": ".5f"},
        notes=[
            "Peak of the larger rank. On a CPU torch's default AdamW is the single-tensor one; "
            "on a GPU it is the for-each one."
        ],
    )
    figures = {name: run(kind, options) for name, kind in _contestants(options)}
    peaks = {name: float(figure["peak"]) for name, figure in figures.items()}
    foreach, fused = peaks["DDP, for-each AdamW"], peaks["DDP, fused AdamW"]
    for name, figure in figures.items():
        peak = peaks[name]
        report.rows.append(
            {
                "": name,
                "base MiB": figure["base"] / MiB,
                "peak MiB": peak / MiB,
                "to for-each DDP": peak / foreach,
                "to fused DDP": peak / fused,
                "loss": figure["loss"],
            }
        )
    report.targets = [
        Target(f"{name} / DDP with for-each AdamW", peaks[f"shardlab {name}"] / foreach, limit)
        for name, limit in LIMITS.items()
        if f"shardlab {name}" in peaks
    ]
    return report


def _contestants(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    yield from PEERS.items()
    for backend in options.backends.split(","):
        yield f"shardlab {backend}", backend


def run(contestant: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one contestant: of the rank with the larger peak."""
    from shardlab.runtime.launch import launch

    say(f"{contestant} ...")
    # Spelled out, though they are what the launcher sets anyway: peers get them too.
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(COMMON | SIZES[options.size]))
        own = ["--contestant", contestant, "--directory", directory, "--sequence", str(options.sequence)]
        code = launch([sys.executable, __file__, *own], RANKS)
        if code:
            raise SystemExit(code)
        results = [json.loads(file.read_text()) for file in sorted(Path(directory).glob("rank-*.json"))]
    return max(results, key=lambda result: result["peak"])


def measure(options: argparse.Namespace) -> None:
    """One rank of one contestant: train a few steps and write what was measured."""
    _import_libraries(options.contestant)
    from shardlab.topology import Topology
    from shardlab.train.meter import MemoryMeter

    topology = Topology.detect(RANKS)
    meter = MemoryMeter(topology)
    base = meter.current_bytes()
    config = options.directory / "config.json"
    steps = _our_steps if options.contestant in OURS else _peer_steps
    losses = steps(options, config, topology.rank)
    loss = 0.0
    for step in range(STEPS):
        if step == MEASURED_FROM:
            meter.reset()
        loss = next(losses)
    result = {"base": base, "peak": meter.peak_bytes() - base, "loss": loss}
    (options.directory / f"rank-{topology.rank}.json").write_text(json.dumps(result))


def _import_libraries(contestant: str) -> None:
    """All that would otherwise be imported while the model is built or in the first steps."""
    names = [
        "torch._inductor.compile_fx",
        "transformers.models.llama.modeling_llama",
    ]  # torch's optimizers want the first
    names += ["shardlab.train.engine"] if contestant in OURS else []
    names += ["shardlab.backends.zero"] if contestant.startswith("zero") else []
    for name in names:
        importlib.import_module(name)


def tokens(step: int, rank: int, config: Path, sequence: int) -> Any:
    """Random tokens (1, sequence + 1) of one rank's micro-batch."""
    import torch

    vocabulary = json.loads(config.read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(step * RANKS + rank)
    return torch.randint(vocabulary, (1, sequence + 1), generator=generator)


def _our_steps(options: argparse.Namespace, config: Path, rank: int) -> Iterator[float]:
    import torch

    from shardlab.data import MicroBatch, Window

    engine = _engine(options, config)
    for step in range(STEPS):
        row = tokens(step, rank, config, options.sequence)
        tensors = {
            "input_ids": row[:, :-1],
            "targets": row[:, 1:],
            "position_ids": torch.arange(options.sequence)[None],
        }
        window = Window(step, (MicroBatch(tensors, rank),), RANKS * options.sequence)
        yield engine.run(window).loss
    engine.close()


def _engine(options: argparse.Namespace, config: Path) -> Any:
    from shardlab.model.build import build_model
    from shardlab.recipe import Recipe
    from shardlab.train.engine import Engine

    recipe = Recipe.from_dict(
        {
            "model": {"config": str(config)},
            "data": {"sequence_length": options.sequence},
            "train": {"precision": "fp32", "global_batch_size": RANKS, "steps": STEPS},
            "shard": {"backend": options.contestant, "micro_batch": 1, "world_size": RANKS},
        }
    )
    engine = Engine.from_recipe(recipe)
    model, weights = build_model(
        recipe.model, vocabulary=1, eos_token_id=None, sequence_length=options.sequence, seed=0
    )
    engine.setup(model, weights, recipe.train.optimizer)
    return engine


def _peer_steps(options: argparse.Namespace, config: Path, rank: int) -> Iterator[float]:
    """What a user writes: DistributedDataParallel, the model's own loss, clipping, AdamW."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = json.loads(config.read_text())
    model = DistributedDataParallel(AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)))
    kind: Any = {"foreach": {"foreach": True}, "default": {}, "fused": {"fused": True}}[options.contestant]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
    for step in range(STEPS):
        row = tokens(step, rank, config, options.sequence)
        loss = model(input_ids=row[:, :-1], labels=row[:, :-1], shift_labels=row[:, 1:], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        yield float(mean) / RANKS


if __name__ == "__main__":
    sys.exit(main())
