"""Predicted peak memory beside the measured one, and beside what other tools' estimators say.

Each cell is a run of `shardlab train` on random weights; measured is the peak of the rank with the larger one, above
what its libraries hold before there is a model. Errors are of the interval's middle; `inside` says whether the measured
peak lies in the interval. DeepSpeed's estimators and Accelerate's `estimate-memory` are asked about the same models:
the first about states on a GPU, the second about the whole training of one process. Cells marked hf are a loop that is
not ours, `plain_loop.py`, and what `shardlab plan --loop` says of it.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import MiB, Report, Target, say

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 7,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {**LLAMA, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "vocab_size": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-64k": {**LLAMA, "vocab_size": 65536, "num_hidden_layers": 3},
    "qwen2": {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 8192, "n_embd": 512, "n_layer": 7, "n_head": 8, "n_positions": 1024,
    },
    "tiny": TINY,
}  # fmt: skip
SHARDED = ("ddp", "fsdp", "zero1", "zero2", "zero3")
SEQUENCE, STEPS = 256, 4


@dataclass(frozen=True)
class Cell:
    """One run. `offload`: what the backend can."""

    model: str
    backend: str
    ranks: int = 2
    precision: str = "fp32"
    recompute: str = "none"
    micro_batch: int = 1
    accumulation: int = 1
    offload: bool = False
    loop: str = "shardlab"

    def __str__(self) -> str:
        what = [] if self.loop == "shardlab" else [self.loop]
        what += [self.model, self.backend, f"x{self.ranks}", self.precision]
        what += [f"recompute {self.recompute}"] * (self.recompute != "none") + ["offload"] * self.offload
        return " ".join([*what, f"{self.micro_batch} x {self.accumulation}"])

    def recipe(self, directory: Path, steps: int) -> dict[str, Any]:
        config = directory / f"{self.model}.json"
        config.write_text(json.dumps(MODELS[self.model]))
        moved = ("optimizer",) if self.backend in ("zero1", "zero2") else ("optimizer", "parameters")
        return {
            "model": {"config": str(config)},
            "data": {"tokenizer": "bytes", "sequence_length": SEQUENCE, "evaluation_fraction": 0.0},
            "train": {
                "steps": steps,
                "global_batch_size": self.micro_batch * self.accumulation * self.ranks,
                "precision": self.precision,
            },
            "shard": {
                "backend": self.backend,
                "micro_batch": self.micro_batch,
                "recompute": self.recompute,
                "offload": dict.fromkeys(moved, "cpu") if self.offload else {},
            },
            "checkpoint": {"every": None},
        }


def cells() -> Iterator[Cell]:
    """Each backend, and each of the other choices with several of them."""
    for backend in SHARDED:
        yield Cell("llama", backend)
        yield Cell("llama", backend, precision="bf16")
        yield Cell("gpt2", backend)
        yield Cell("llama-tied", backend, recompute="full", micro_batch=4)
    for backend in ("fsdp", "zero2", "zero3"):
        yield Cell("llama", backend, micro_batch=4)
        yield Cell("llama-64k", backend)
        yield Cell("llama", backend, offload=True)
    for backend in ("ddp", "fsdp", "zero1", "zero3"):
        yield Cell("qwen2", backend, recompute="full", micro_batch=4, accumulation=4)
    yield Cell("llama", "ddp", ranks=1)
    yield Cell("llama", "ddp", ranks=1, precision="bf16", micro_batch=4)
    yield Cell("gpt2", "ddp", ranks=1, micro_batch=4)
    yield Cell("qwen2", "fsdp", precision="bf16", accumulation=4)
    yield Cell("gpt2", "zero2", precision="bf16", accumulation=4)
    for ranks in (1, 2):
        yield Cell("llama", "ddp", ranks, loop="hf")
        yield Cell("llama", "ddp", ranks, precision="bf16", micro_batch=4, loop="hf")
    yield Cell("llama-64k", "ddp", 1, loop="hf")
    yield Cell("llama-tied", "ddp", 1, recompute="full", micro_batch=4, loop="hf")
    yield Cell("gpt2", "ddp", 1, accumulation=4, loop="hf")
    yield Cell("llama", "ddp", 1, precision="bf16", loop="hf-bf16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("30m", "tiny"), default="30m", help="tiny shows only that it runs")
    parser.add_argument("--only", default="", help="cells whose line contains this, such as zero3 or bf16")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args()
    chosen = [Cell("tiny", "ddp", ranks=1)] if options.size == "tiny" else list(cells())
    measure([cell for cell in chosen if options.only in str(cell)]).print(options.json)
    return 0


def measure(chosen: list[Cell]) -> Report:
    """Run every cell, one after another."""
    report = Report(
        f"Predicted and measured peak memory of a rank, MiB above the libraries' base: sequence {SEQUENCE}",
        {"cell": "", "tensors": ".0f", "low": ".0f", "middle": ".0f", "high": ".0f", "measured": ".0f",
         "error %": "+.1f", "inside": "", "DeepSpeed's": ".0f", "Accelerate's": ".0f"},
        notes=["DeepSpeed's: its estimator's memory of a GPU and a CPU's share together, 16-bit weights, states only. "
               "Accelerate's: weights, gradients and Adam in fp32, for one process."],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        for cell in chosen:
            report.rows.append(_row(cell, Path(directory)))
    errors = sorted(abs(float(row["error %"])) for row in report.rows)
    inside = [row["inside"] == "yes" for row in report.rows]
    report.targets = [
        Target("share of cells outside the interval", 1 - sum(inside) / len(inside), 0.0),
        Target("error in 90% of the cells, %", errors[max(0, int(len(errors) * 0.9) - 1)], 5.0),
        Target("largest error, %", errors[-1], 10.0),
    ]
    return report


def run_cell(cell: Cell, directory: Path, steps: int = STEPS) -> dict[str, Any]:
    """The summary of a run of `shardlab train`."""
    output = directory / f"run-{abs(hash(cell))}"
    recipe = _write_recipe(cell, directory, steps)
    _run(cell, [sys.executable, "-m", "shardlab", "train", recipe, "--nproc", cell.ranks, "--output", output])
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def _write_recipe(cell: Cell, directory: Path, steps: int) -> Path:
    recipe = directory / "recipe.yaml"
    recipe.write_text(json.dumps(cell.recipe(directory, steps)))
    return recipe


def _row(cell: Cell, directory: Path) -> dict[str, Any]:
    say(f"{cell} ...")
    predicted, measured = (_ours if cell.loop == "shardlab" else _plain)(cell, directory)
    return {
        "cell": str(cell),
        **{key: predicted[key] / MiB for key in ("tensors", "low", "middle", "high")},
        "measured": measured / MiB,
        "error %": 100 * (predicted["middle"] / measured - 1),
        "inside": "yes" if predicted["low"] <= measured <= predicted["high"] else "NO",
        "DeepSpeed's": _deepspeed(cell),
        "Accelerate's": _accelerate(cell),
    }


def _ours(cell: Cell, directory: Path) -> tuple[dict[str, Any], int]:
    """What a run of `shardlab train` predicted, and the peak of the rank with the larger one."""
    summary = run_cell(cell, directory)
    bases, peaks = summary["base_memory_bytes"], summary["peak_memory_bytes"]
    return summary["predicted_memory_bytes"], max(peak - base for base, peak in zip(bases, peaks, strict=True))


def _plain(cell: Cell, directory: Path) -> tuple[dict[str, Any], int]:
    """The same of a loop that is not ours."""
    recipe = _write_recipe(cell, directory, STEPS)
    plan = [sys.executable, "-m", "shardlab", "plan", recipe, "--nproc", cell.ranks, "--loop", cell.loop, "--json"]
    predicted = json.loads(_run(cell, plan))["recipe"]["footprint"]
    settings, result = recipe.with_name("settings.json"), recipe.with_name("result.json")
    asked = {name: getattr(cell, name) for name in ("precision", "recompute", "micro_batch", "accumulation", "loop")}
    settings.write_text(json.dumps({**asked, "model": MODELS[cell.model], "sequence_length": SEQUENCE}))
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", cell.ranks] if cell.ranks > 1 else []
    _run(cell, [sys.executable, *ranks, Path(__file__).with_name("plain_loop.py"), settings, result])
    return predicted, max(json.loads(result.read_text())["peaks"])


def _run(cell: Cell, command: list[Any]) -> str:
    # The malloc of the launch line that `shardlab plan --emit` writes; our own loop sets its own.
    malloc = {} if cell.loop == "shardlab" else {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
    environment = {**os.environ, **malloc}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{cell} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _model(cell: Cell) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[cell.model]))


def _deepspeed(cell: Cell) -> float | None:
    """What its estimator gives for the stage; it has none for stage 1."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints log lines
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model = _model(cell)
    total = sum(parameter.numel() for parameter in model.parameters())
    with contextlib.redirect_stdout(io.StringIO()):
        if cell.backend == "zero2":
            host, device = estimate_zero2_model_states_mem_needs(
                total, num_gpus_per_node=cell.ranks, num_nodes=1, cpu_offload=cell.offload, additional_buffer_factor=1
            )
        elif cell.backend == "zero3":
            largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
            host, device, _largest = estimate_zero3_model_states_mem_needs(
                total, largest, num_gpus_per_node=cell.ranks, num_nodes=1, cpu_offload=cell.offload,
                cpu_offload_params=cell.offload, zero_init=True, additional_buffer_factor=1,
            )  # fmt: skip
        else:
            return None
    return float(device + (host / cell.ranks if cell.offload else 0)) / MiB


def _accelerate(cell: Cell) -> float:
    """Its rule: four times the weights for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _largest = calculate_maximum_sizes(_model(cell))
    return float(max(estimate_training_usage(size, "float32").values())) / MiB


if __name__ == "__main__":
    sys.exit(main())
