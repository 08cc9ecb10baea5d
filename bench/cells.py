"""What `plan_accuracy.py` and `cost_accuracy.py` run: models, and the ways to train them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept import CellError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 7,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {**LLAMA, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "vocab_size": 1024}
LARGE = {
    **LLAMA, "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-64k": {**LLAMA, "vocab_size": 65536, "num_hidden_layers": 3},
    "llama-64k-tied": {**LLAMA, "vocab_size": 65536, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "llama-150m": LARGE,
    "qwen2": {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2-tied": {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 8192, "n_embd": 512, "n_layer": 7, "n_head": 8, "n_positions": 1024,
    },
    "tiny": TINY,
}  # fmt: skip
SHARDED = ("ddp", "fsdp", "zero1", "zero2", "zero3")
SEQUENCE = 256


@dataclass(frozen=True)
class Cell:
    """One run. `offload`: what the backend can. `saving`: a checkpoint in the background after each step.

    `kept` and `compiled` are the recipe's `shard.keep_freed` and `train.compile`.
    """

    model: str
    backend: str
    ranks: int = 2
    precision: str = "fp32"
    recompute: str = "none"
    micro_batch: int = 1
    accumulation: int = 1
    offload: bool = False
    loop: str = "shardlab"
    saving: bool = False
    kept: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        what = [] if self.loop == "shardlab" else [self.loop]
        what += [self.model, self.backend, f"x{self.ranks}", self.precision]
        what += [f"recompute {self.recompute}"] * (self.recompute != "none") + ["offload"] * self.offload
        what += ["saving"] * self.saving + ["freed kept"] * self.kept + ["compiled"] * self.compiled
        return " ".join([*what, f"{self.micro_batch} x {self.accumulation}"])

    def write_recipe(self, directory: Path, steps: int) -> Path:
        """Its recipe, in `directory`."""
        config, recipe = directory / f"{self.model}.json", directory / "recipe.yaml"
        config.write_text(json.dumps(MODELS[self.model]))
        recipe.write_text(json.dumps(self._recipe(config, steps)))
        return recipe

    def _recipe(self, config: Path, steps: int) -> dict[str, Any]:
        moved = ("optimizer",) if self.backend in ("zero1", "zero2") else ("optimizer", "parameters")
        return {
            "model": {"config": str(config)},
            "data": {"tokenizer": "bytes", "sequence_length": SEQUENCE, "evaluation_fraction": 0.0},
            "train": {
                "steps": steps,
                "global_batch_size": self.micro_batch * self.accumulation * self.ranks,
                "precision": self.precision,
                "compile": self.compiled,
            },
            "shard": {
                "backend": self.backend,
                "micro_batch": self.micro_batch,
                "recompute": self.recompute,
                "keep_freed": self.kept,
                "offload": dict.fromkeys(moved, "cpu") if self.offload else {},
            },
            "checkpoint": {"every": 1 if self.saving else None, "keep": 1},
        }

    def run(self, command: list[Any]) -> str:
        """What a command says on stdout. Raises CellError where it fails."""
        # The malloc of the launch line that `shardlab plan --emit` writes; our own loop sets its own.
        malloc = {} if self.loop == "shardlab" else {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
        environment = {**os.environ, **malloc}
        done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise CellError(f"{self} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout

    def train(self, directory: Path, steps: int) -> dict[str, Any]:
        """The summary of a run of `shardlab train`."""
        recipe, output = self.write_recipe(directory, steps), directory / "run"
        self.run([sys.executable, "-m", "shardlab", "train", recipe, "--nproc", self.ranks, "--output", output])
        summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
        return summary


def memory_cells() -> Iterator[Cell]:
    """Each backend, and each of the other choices with several of them."""
    for backend in SHARDED:
        yield Cell("llama", backend)
        yield Cell("llama", backend, precision="bf16")
        yield Cell("gpt2", backend)
        yield Cell("llama-tied", backend, recompute="full", micro_batch=4)
        yield Cell("llama-150m", backend)
    for backend in ("fsdp", "zero2", "zero3"):
        yield Cell("llama", backend, micro_batch=4)
        yield Cell("llama-64k", backend)
        yield Cell("llama", backend, offload=True)
    for backend in ("ddp", "fsdp", "zero1", "zero3"):
        yield Cell("qwen2", backend, recompute="full", micro_batch=4, accumulation=4)
    for backend in ("ddp", "fsdp", "zero3"):
        yield Cell("llama-150m", backend, precision="bf16", micro_batch=4)
        yield Cell("llama-64k-tied", backend)
    yield Cell("llama", "ddp", ranks=1)
    yield Cell("llama", "ddp", ranks=1, precision="bf16", micro_batch=4)
    yield Cell("llama-150m", "ddp", ranks=1, precision="bf16", micro_batch=4)
    yield Cell("gpt2", "ddp", ranks=1, micro_batch=4)
    yield Cell("qwen2", "fsdp", precision="bf16", accumulation=4)
    yield Cell("qwen2-tied", "zero2", micro_batch=4)
    yield Cell("qwen2-tied", "fsdp", precision="bf16", micro_batch=4)
    yield Cell("gpt2", "zero2", precision="bf16", accumulation=4)
    yield Cell("llama", "ddp", kept=True)
    yield Cell("llama-150m", "ddp", precision="bf16", micro_batch=4, kept=True)
    yield Cell("llama", "ddp", ranks=1, precision="bf16", micro_batch=4, kept=True)
    yield Cell("gpt2", "ddp", ranks=1, micro_batch=4, kept=True)
    yield Cell("llama", "ddp", compiled=True)
    yield Cell("llama", "fsdp", precision="bf16", micro_batch=4, compiled=True)
    yield Cell("llama-150m", "ddp", ranks=1, precision="bf16", micro_batch=4, compiled=True)
    for backend in ("ddp", "fsdp", "zero2", "zero3"):
        yield Cell("llama", backend, saving=True)
    yield Cell("llama", "fsdp", precision="bf16", saving=True)
    yield Cell("llama", "ddp", ranks=1, saving=True)


def plain_cells() -> Iterator[Cell]:
    """Loops that are not ours."""
    for ranks in (1, 2):
        yield Cell("llama", "ddp", ranks, loop="hf")
        yield Cell("llama", "ddp", ranks, precision="bf16", micro_batch=4, loop="hf")
    yield Cell("llama-64k", "ddp", 1, loop="hf")
    yield Cell("llama-tied", "ddp", 1, recompute="full", micro_batch=4, loop="hf")
    yield Cell("gpt2", "ddp", 1, accumulation=4, loop="hf")
    yield Cell("llama", "ddp", 1, precision="bf16", loop="hf-bf16")
    for backend in ("zero1", "zero2", "zero3"):
        yield Cell("llama", backend, loop="hf")
        yield Cell("llama", backend, precision="bf16", micro_batch=4, loop="hf")
