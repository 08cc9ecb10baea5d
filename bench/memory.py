"""Peak memory of the same step beside torch's FSDP2 and DeepSpeed ZeRO-3: two ranks, 8 sequences of 512 tokens.

Each contestant is two processes of one thread. Peers are there twice: with our allocator settings, fused AdamW and
recompute of whole blocks; and as their users run them, with neither of these. (FSDP2 by hand: on a CPU Accelerate turns
it into DDP.) All train random tokens, weights in fp32 and bf16 compute. Peak: anonymous and shared pages of the larger
rank in the second step (the first makes the optimizer's state), above what its libraries hold before the model.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kept import CellError, Kept
from report import MiB, Report, Target
from turns import _ranks

WIDTHS: dict[str, dict[str, int]] = {
    "150m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4},
}
COMMON = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False}
RANKS, ROWS, STEPS = 2, 8, 2
HALF = 0.5  # of the peer's peak, as its users run it
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}  # what our launcher sets


@dataclass(frozen=True)
class Contestant:
    """One way to train. `alike`: a peer has what ours has, or is as its users run it; `shard` is our recipe's."""

    name: str
    kind: str
    alike: bool = True
    shard: dict[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> bool:
        return self.kind != "ours"


AGAIN = {"recompute": "full"}
CONTESTANTS = (
    Contestant("FSDP2, as users run it", "fsdp2", alike=False),
    Contestant("FSDP2, alike", "fsdp2"),
    Contestant("ZeRO-3, as users run it", "zero3", alike=False),
    Contestant("ZeRO-3, alike", "zero3"),
    Contestant("shardlab fsdp", "ours", shard={"backend": "fsdp", **AGAIN}),
    Contestant(
        "shardlab fsdp, activations on the disk",
        "ours",
        shard={"backend": "fsdp", **AGAIN, "offload": {"activations": "disk"}},
    ),
    Contestant("shardlab zero3", "ours", shard={"backend": "zero3", **AGAIN}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=WIDTHS, default="150m", help="model; tiny shows only that it runs")
    parser.add_argument("--vocabulary", type=int, action="append", help="may be given several times [32768 and 131072]")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--only", action="append", help="contestants whose name contains this; several times")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep rows there; cells in it are not run again")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--contestant", type=int, help=argparse.SUPPRESS)  # a rank's own process
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        from shardlab.runtime.child import run_rank

        return run_rank(lambda: measure(CONTESTANTS[options.contestant], options))
    kept = Kept(options.results)
    compare(options, kept).print(options.json)
    return 1 if kept.failed else 0


def compare(options: argparse.Namespace, kept: Kept) -> Report:
    """Run every contestant that is asked for, one after another."""
    report = Report(
        f"Peak memory of a rank above the libraries' base: {options.size}, {RANKS} ranks, bf16, {ROWS} sequences of "
        f"{options.sequence} tokens a step, in one micro-batch of each rank",
        {"cell": "", "base MiB": ".0f", "peak MiB": ".0f", "loss": ".4f"},
    )
    for vocabulary in options.vocabulary or (32768, 131072):
        peaks: dict[str, float] = {}
        for number, one in enumerate(CONTESTANTS):
            cell = f"{options.size}, vocabulary {vocabulary}: {one.name}"
            asked = options.only is None or any(part in one.name for part in options.only)
            row = kept.row(cell, partial(run, number, vocabulary, options)) if asked else None
            if row is not None:
                report.rows.append(row)
                peaks[one.name] = row["peak MiB"]
        for ours, peer in (("shardlab fsdp", "FSDP2"), ("shardlab zero3", "ZeRO-3")):
            theirs = f"{peer}, as users run it"
            if ours in peaks and theirs in peaks:
                report.targets.append(Target(f"{vocabulary}: {ours} / {theirs}", peaks[ours] / peaks[theirs], HALF))
    report.notes = [f"failed: {one}" for one in kept.failed]
    return report


def run(number: int, vocabulary: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one contestant: of the rank with the larger peak. Raises CellError."""
    one = CONTESTANTS[number]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= ALLOCATOR if one.alike else {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(
            json.dumps(COMMON | WIDTHS[options.size] | {"vocab_size": vocabulary})
        )
        own = [sys.executable, __file__, "--contestant", str(number), "--directory", directory]
        own += ["--sequence", str(options.sequence)]
        jobs = [
            subprocess.Popen(own, env=environment | rank, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in _ranks(RANKS)
        ]
        said = [job.communicate()[1] for job in jobs]
        for job, text in zip(jobs, said, strict=True):
            if job.returncode:
                raise CellError(text or f"ended with {job.returncode}")
        results = [json.loads(file.read_text()) for file in sorted(Path(directory).glob("rank-*.json"))]
    largest = max(results, key=lambda result: result["peak"])
    return {"base MiB": largest["base"] / MiB, "peak MiB": largest["peak"] / MiB, "loss": largest["loss"]}


def measure(one: Contestant, options: argparse.Namespace) -> None:
    """One rank: train a few steps and write what was measured."""
    names = ["torch._inductor.compile_fx", "transformers.models.llama.modeling_llama", "shardlab.train.engine"]
    names += ["shardlab.backends.zero"] if "zero3" in (one.kind, one.shard.get("backend")) else []
    for name in names:  # all that would otherwise be imported while the model is built, or in the first steps
        importlib.import_module(name)
    from shardlab.topology import Topology
    from shardlab.train.meter import MemoryMeter

    topology = Topology.detect(RANKS)
    meter = MemoryMeter(topology)
    base = meter.current_bytes()
    steps = {"ours": _our_steps, "fsdp2": _fsdp_steps, "zero3": _zero_steps}[one.kind]
    losses, loss = steps(one, options), 0.0
    for step in range(STEPS):
        if step == STEPS - 1:
            meter.reset()
        loss = next(losses)
    result = {"base": base, "peak": meter.peak_bytes() - base, "loss": loss}
    (options.directory / f"rank-{topology.rank}.json").write_text(json.dumps(result))


def _rows(step: int, options: argparse.Namespace) -> Any:
    """This rank's random tokens, (rows, sequence + 1)."""
    import torch

    config = json.loads((options.directory / "config.json").read_text())
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(config["vocab_size"], (ROWS, options.sequence + 1), generator=generator)
    return rows[int(os.environ["RANK"]) :: RANKS]


def _our_steps(one: Contestant, options: argparse.Namespace) -> Iterator[float]:
    import torch

    from shardlab.data import MicroBatch, Window
    from shardlab.model.build import build_model
    from shardlab.recipe import Recipe
    from shardlab.train.engine import Engine

    recipe = Recipe.from_dict(
        {
            "model": {"config": str(options.directory / "config.json")},
            "data": {"sequence_length": options.sequence},
            "train": {"precision": "bf16", "global_batch_size": ROWS, "steps": STEPS},
            "shard": {"micro_batch": ROWS // RANKS, "world_size": RANKS, **one.shard},
        }
    )
    engine = Engine.from_recipe(recipe, output=options.directory / "run")
    model, weights = build_model(
        recipe.model, vocabulary=1, eos_token_id=None, sequence_length=options.sequence, seed=0
    )
    engine.setup(model, weights, recipe.train.optimizer)
    for step in range(STEPS):
        rows = _rows(step, options)
        positions = torch.arange(options.sequence).repeat(len(rows), 1)
        tensors = {"input_ids": rows[:, :-1], "targets": rows[:, 1:], "position_ids": positions}
        batch = MicroBatch(tensors, engine.topology.rank)
        yield float(engine.run(Window(step, (batch,), ROWS * options.sequence)).loss or 0.0)
    engine.close()


def _peer_model(one: Contestant, options: argparse.Namespace, dtype: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**json.loads((options.directory / "config.json").read_text()))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if one.alike:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _fsdp_steps(one: Contestant, options: argparse.Namespace) -> Iterator[float]:
    """`fully_shard` around each block and the model, the model's own loss, clipping, AdamW."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _peer_model(one, options, torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=one.alike or None)
    for step in range(STEPS):
        loss = _peer_loss(model, step, options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield _mean(loss)


def _zero_steps(one: Contestant, options: argparse.Namespace) -> Iterator[float]:
    """`deepspeed.initialize` at stage 3; what is not set is DeepSpeed's own, its buckets of 5e8 elements included."""
    import deepspeed
    import torch

    from shardlab.runtime.extensions import without_shm_comm

    without_shm_comm()  # compiling it takes a minute, and only inference uses it
    deepspeed.init_distributed("gloo", verbose=False)
    model = _peer_model(one, options, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=one.alike or None)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        loss = _peer_loss(engine, step, options)
        engine.backward(loss)
        engine.step()
        yield _mean(loss)


def _peer_loss(model: Any, step: int, options: argparse.Namespace) -> Any:
    rows = _rows(step, options)
    inputs, targets = rows[:, :-1], rows[:, 1:].contiguous()
    return model(input_ids=inputs, labels=inputs, shift_labels=targets, use_cache=False).loss


def _mean(loss: Any) -> float:
    import torch.distributed as dist

    mean = loss.detach().float()
    dist.all_reduce(mean)
    return float(mean) / RANKS


if __name__ == "__main__":
    sys.exit(main())
