"""What every stage does around its own work: read the rows, write a directory that is there whole or not at all."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardlab.checkpoint.listing import hidden_name
from shardlab.compress.quality import Quality
from shardlab.compress.walk import Batch
from shardlab.data import evaluation_batches, prepare_data
from shardlab.data.window import IGNORED
from shardlab.errors import UserError
from shardlab.recipe import DataSection

MICRO_BATCH = 4
SHARD_BYTES = 256 * 1024**2  # of a file: what is held before it is written
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx")


@dataclass(frozen=True)
class Rows:
    """Rows of text: what a stage calibrates with, and what it is judged by."""

    calibration: list[Batch]
    held_out: list[Batch]

    @property
    def tokens(self) -> int:
        """Tokens of calibration that count."""
        return sum(int((batch["targets"] != IGNORED).sum()) for batch in self.calibration)


def read_rows(data: DataSection, *, calibration: int, held_out: int, seed: int = 0) -> Rows:
    """`calibration` rows drawn from the training text, and the first `held_out` rows of the other, or all there are.

    Raises UserError where nothing is held out.
    """
    prepared = prepare_data(data)
    if prepared.evaluation is None:
        raise UserError("nothing is held out: give text files of at least two documents, or more text")
    train: Any = prepared.train
    chosen = np.random.default_rng(seed).permutation(len(train))[:calibration].astype(np.int64)
    parts = [chosen[start : start + MICRO_BATCH] for start in range(0, len(chosen), MICRO_BATCH)]
    judged = evaluation_batches(prepared.evaluation, micro_batch=MICRO_BATCH, rank=0, world_size=1, limit=held_out)
    return Rows([train.batch(part) for part in parts], [batch.tensors for batch in judged])


def source_config(directory: Path, *, quantized: bool = False) -> dict[str, Any]:
    """config.json of a model that is not quantized yet, unless it may be. Raises UserError for any other directory."""
    if (directory / "adapter_config.json").is_file():
        raise UserError(f"{directory} holds adapters only; `shardlab merge {directory} OUT` makes a model of them")
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} is not a Hugging Face model directory: it has no config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it is not an object")
    if "quantization_config" in config and not quantized:
        raise UserError(f"{directory} is quantized already: start from the directory that it was made from")
    return config


@contextmanager
def output_directory(source: Path, output: Path) -> Iterator[Path]:
    """A directory beside `output`, with what `source` has beside weights; renamed to `output` at the end.

    Raises UserError if `output` exists. Whatever goes wrong inside leaves nothing behind.
    """
    refuse_existing(output)
    partial = output.with_name(hidden_name(output.name, "partial"))
    partial.mkdir(parents=True)
    try:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS) and not path.name.startswith("shardlab_"):
                shutil.copyfile(path, partial / path.name)
        yield partial
        refuse_existing(output)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(output: Path) -> None:
    """Raises UserError if there is something."""
    if output.exists():
        raise UserError(f"{output} exists; it is never overwritten. Remove it or choose another directory")


def write_config(directory: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """config.json of weights in `dtype`."""
    written = {**config, "dtype": str(dtype).removeprefix("torch.")}
    written.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def quality_figures(quality: Quality | None) -> dict[str, Any]:
    """For the card."""
    if quality is None:
        return {}
    return {
        "held_out_tokens": quality.tokens,
        "loss": {"before": quality.loss_before, "after": quality.loss_after},
        "perplexity": {"before": quality.perplexity_before, "after": quality.perplexity_after},
        "kl_divergence": quality.divergence,
        "top_token_agreement": quality.agreement,
    }


Say = Callable[[str], None]


def converted(name: str, parameter: Tensor, dtype: torch.dtype) -> tuple[str, Tensor]:
    """`parameter` as it is written; its value in memory becomes what will be read back."""
    stored = parameter.detach().to(dtype)
    parameter.copy_(stored)
    return name, stored.cpu()
