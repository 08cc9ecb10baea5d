"""An artifact of any format, opened alike: a model directory, an ONNX directory, a GGUF file."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.compress.compare import Logits, compare_logits, refuse_other_tokenizers, transformers_logits
from shardlab.compress.quality import Quality
from shardlab.compress.stage import source_config
from shardlab.data import evaluation_batches, prepare_data
from shardlab.data.window import IGNORED, MicroBatch
from shardlab.errors import UserError
from shardlab.export.gguf_tokenizer import rebuild
from shardlab.export.llama_cpp import LlamaCpp
from shardlab.export.onnx_runtime import FILE as ONNX_FILE
from shardlab.export.onnx_runtime import OnnxModel
from shardlab.export.source import require
from shardlab.recipe import DataSection
from shardlab.train.evaluate import evaluate_directory, figures

Kind = Literal["hf", "onnx", "gguf"]


class Runtime(Protocol):
    """A loaded model that remembers the tokens it was given."""

    @property
    def tokens(self) -> int:
        """For which there are logits."""

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """After each of `tokens`, with nothing remembered before: (len(tokens), vocabulary)."""

    def extend(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """Logits after the last of `tokens`, which follow the `position` tokens that are remembered."""

    def forget(self) -> None:
        """Begin anew."""

    def close(self) -> None:
        """Give the memory back."""


def kind_of(path: Path) -> Kind:
    """By what is there. Raises UserError where there is nothing, or a file that is no GGUF."""
    if (path / ONNX_FILE).is_file():
        return "onnx"
    if path.is_dir():
        return "hf"
    if not path.is_file():
        raise UserError(f"{path}: there is no such model")
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return "gguf"
    raise UserError(f"{path} is neither a model directory nor a GGUF file")


def artifact_bytes(path: Path) -> int:
    """Of the weights on disk, and of what lies in the same file."""
    if path.is_file():
        return path.stat().st_size
    pattern = f"{ONNX_FILE}*" if kind_of(path) == "onnx" else "*.safetensors"
    return sum(file.stat().st_size for file in path.glob(pattern) if not file.name.startswith("shardlab_"))


def positions_of(path: Path) -> int:
    """Tokens that the model has room for."""
    if kind_of(path) == "gguf":
        fields = _fields(path)
        return int(fields[f"{fields['general.architecture']}.context_length"])
    config = source_config(path, quantized=True)
    return int(config.get("max_position_embeddings") or config.get("n_positions") or sys.maxsize)


def _fields(path: Path) -> dict[str, Any]:
    library = require("gguf")
    try:
        return {name: field.contents() for name, field in library.GGUFReader(path).fields.items()}
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def open_runtime(path: Path, *, context: int, threads: int | None = None) -> Runtime:
    """`path` in its own runtime: onnxruntime, llama.cpp (with `context` tokens at most), or transformers.

    transformers takes weights in the dtype that they are stored in.
    """
    kind = kind_of(path)
    if kind == "onnx":
        return OnnxModel(path, threads=threads)
    if kind == "gguf":
        return LlamaCpp(path, context=context, threads=threads)
    from shardlab.export.hf_runtime import HfModel

    return HfModel(path)


@contextmanager
def tokenizer_directory(path: Path) -> Iterator[Path]:
    """A directory with the artifact's tokenizer: its own, or one for the time being with what a GGUF file holds."""
    if kind_of(path) != "gguf":
        yield path
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / path.name
        rebuild(_fields(path)).save_pretrained(directory)
        yield directory


def evaluate_artifact(path: Path, data: DataSection, *, rows: int | None = None) -> dict[str, Any]:
    """Loss, perplexity and tokens on `data`'s evaluation split (`rows`: the first ones), by the artifact's tokenizer.

    A model directory is evaluated as training would; the others document by document in their own runtime.
    """
    with tokenizer_directory(path) as tokenizer:
        data = data.model_copy(update={"tokenizer": str(tokenizer.absolute())})
        if kind_of(path) == "hf":
            return evaluate_directory(path, data, rows=rows)
        _refuse_longer(path, data.sequence_length)
        prepared = prepare_data(data)
        if prepared.evaluation is None:
            raise UserError("nothing is held out: give --files, or more text")
        logits = _logits(path, data.sequence_length)
        total, tokens = 0.0, 0
        for batch in evaluation_batches(prepared.evaluation, micro_batch=1, rank=0, world_size=1, limit=rows):
            targets = batch.tensors["targets"].flatten()
            counted = targets != IGNORED
            losses = torch.nn.functional.cross_entropy(logits(batch)[counted], targets[counted], reduction="sum")
            total, tokens = total + losses.item(), tokens + int(counted.sum())
    return figures(total, tokens)


def compare_artifacts(original: Path, changed: Path, data: DataSection, *, rows: int | None = None) -> Quality:
    """`changed` beside `original`, each in its own runtime (transformers in fp32), on `data`'s evaluation split.

    Of that the first `rows` rows, or all. Raises UserError where nothing is held out, or their tokens are not the same.
    """
    for path in (original, changed):
        _refuse_longer(path, data.sequence_length)
    with tokenizer_directory(original) as first, tokenizer_directory(changed) as second:
        refuse_other_tokenizers(first, second)
        data = data.model_copy(update={"tokenizer": str(second.absolute())})
        before, after = (_logits(path, data.sequence_length) for path in (original, changed))
        return compare_logits(before, after, data, rows=rows)


def _refuse_longer(path: Path, sequence_length: int) -> None:
    if sequence_length > (most := positions_of(path)):
        raise UserError(f"{path} has {most} positions: give --sequence-length {most} or less")


def _logits(path: Path, context: int) -> Logits:
    if kind_of(path) == "hf":
        return transformers_logits(path)
    runtime = open_runtime(path, context=context)

    def logits(batch: MicroBatch) -> Tensor:
        """Document by document: these runtimes know nothing of several in a row."""
        tokens, positions = batch.tensors["input_ids"], batch.tensors["position_ids"]
        rows = []
        for row, places in zip(tokens, positions, strict=True):
            for document in torch.tensor_split(row, (places == 0).nonzero().flatten()[1:]):
                rows.append(torch.from_numpy(runtime.logits(document.tolist())))
        return torch.cat(rows)

    return logits
