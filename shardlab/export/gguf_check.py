"""A written GGUF file, checked: read back by another reader, then run by llama.cpp beside transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardlab.export.gguf_families import Family, from_file
from shardlab.export.gguf_file import BLOCK, GgufDtype, GgufTensor, Value, pieces
from shardlab.export.llama_cpp import LlamaCpp
from shardlab.export.source import Source, require

BOUNDS: dict[GgufDtype, float] = {"f32": 1e-3, "f16": 1e-2, "bf16": 3e-2, "q8_0": 1e-1, "q4_0": 1e-1, "q4_1": 1e-1}
"""How far llama.cpp's logits may be from those of transformers with the file's own weights: the length of the
difference beside that of the logits, each position's mean taken off. It rounds activations to f16, bf16 or 8 bits as
the weights are, and has GELU from a table; query and key rows in a wrong order come to 0.3 and more."""

_LENGTHS = (1, 7, 40)  # tokens of each comparison
_TEXTS = (
    "def read(path):\n\treturn open(path).read()  # it's 1234.5 bytes\n\n\n",
    "  Grüße, naïve façade — 東京 🙂!? We'll see; they've 99%\r\n",
    "\x00\x01\x02 x",
)


class ExportCheckError(RuntimeError):
    """What was written is not what it should be; the file is not kept."""


@dataclass(frozen=True)
class Agreement:
    """Of two runtimes, over all positions compared."""

    error: float  # relative, see BOUNDS
    largest: float  # difference of one logit
    same_token: float  # share of positions with the same likeliest token


def read_back(path: Path, metadata: Mapping[str, Value], tensors: Sequence[GgufTensor]) -> None:
    """Compare every value in the file with what it was written from. Raises ExportCheckError where one differs."""
    reader = require("gguf").GGUFReader(path)
    for key, value in metadata.items():
        field = reader.get_field(key)
        found = None if field is None else field.contents()
        same = np.float32(value) == np.float32(found) if isinstance(value, float) else found == value
        if not same:
            raise ExportCheckError(f"{path}: {key} reads back as {_short(found)}, not {_short(value)}")
    names = [tensor.name for tensor in reader.tensors]
    if names != [tensor.name for tensor in tensors]:
        raise ExportCheckError(f"{path}: the tensors read back are {_short(names)}")
    for tensor, stored in zip(tensors, reader.tensors, strict=True):
        if tuple(int(n) for n in stored.shape[::-1]) != tensor.shape:
            raise ExportCheckError(f"{path}: {tensor.name} reads back with shape {stored.shape[::-1]}")
        row = 0
        for piece in pieces(tensor.load()):
            values = dequantized(stored, slice(row, row + len(piece)))
            row += len(piece)
            if not (np.abs(values - piece.numpy()) <= _allowed(piece.numpy(), tensor.dtype)).all():
                raise ExportCheckError(f"{path}: {tensor.name} reads back with other values")


def dequantized(stored: Any, rows: slice) -> NDArray[np.float32]:
    """Some rows of a reader's tensor, fp32, as torch has its shape."""
    gguf = require("gguf")
    values: NDArray[np.float32] = gguf.dequantize(stored.data[rows], stored.tensor_type)
    return values.reshape(-1, *(int(n) for n in stored.shape[::-1][1:]))


def run_beside_transformers(path: Path, source: Source, known: Family, dtype: GgufDtype) -> Agreement:
    """Logits of llama.cpp and of transformers, which is given the file's own (dequantized) weights.

    So that only the runtimes' arithmetic differs, whatever the dtype costs in quality. Texts must also become the same
    tokens in both. Raises ExportCheckError beyond the bound.
    """
    positions = min(max(_LENGTHS), int(source.config.max_position_embeddings))
    runtime = LlamaCpp(path, context=positions, exact=True)
    try:
        _same_tokens(runtime, source, path)
        reference = _with_weights_of(path, source, known)
        agreement = _compare(runtime, reference, source, positions)
    finally:
        runtime.close()
    if not agreement.error <= BOUNDS[dtype]:  # also if it is NaN
        raise ExportCheckError(
            f"{path}: llama.cpp's logits are {agreement.error:.2g} from transformers', allowed are {BOUNDS[dtype]:.2g} "
            f"for {dtype} ({agreement.same_token:.0%} of the likeliest tokens agree)"
        )
    return agreement


def _allowed(values: NDArray[np.float32], dtype: GgufDtype) -> NDArray[np.floating]:
    """The most that a value may change by its dtype's definition."""
    if dtype in ("f32", "f16", "bf16"):
        spacing = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
        return np.abs(values) * spacing + (2.0**-25 if dtype == "f16" else 0.0)
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    if dtype == "q4_1":
        step = (blocks.max(-1) - blocks.min(-1)) / 15
        reach = 0.5 * step + np.abs(blocks).max(-1) * 2.0**-10  # scale and smallest value are rounded to f16
    else:
        # A scale is rounded to f16; q4_0 has -8 to 7, so a large value of the other sign may be cut by a whole step.
        reach = np.abs(blocks).max(-1) * (1.01 / 8 if dtype == "q4_0" else 0.57 / 127)
    return np.repeat(reach + 2.0**-24 * 16, BLOCK, axis=-1).reshape(values.shape)


def _same_tokens(runtime: LlamaCpp, source: Source, path: Path) -> None:
    if runtime.tokens != source.rows:
        raise ExportCheckError(f"{path}: llama.cpp sees {runtime.tokens} tokens, the embedding has {source.rows} rows")
    for text in _TEXTS:
        ours = source.tokenizer(text, add_special_tokens=False)["input_ids"]
        theirs = runtime.tokenize(text)
        if theirs != ours:
            raise ExportCheckError(f"{path}: llama.cpp tokenizes {text!r} as {_short(theirs)}, not {_short(ours)}")


def _with_weights_of(path: Path, source: Source, known: Family) -> Any:
    """transformers' model, fp32, with the values that the file holds."""
    from transformers import AutoModelForCausalLM

    reader = require("gguf").GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(np.array(dequantized(stored[known.name(name)], slice(None))))
            parameter.copy_(from_file(known, source.config, name, value))
    return model


def _compare(runtime: LlamaCpp, reference: Any, source: Source, positions: int) -> Agreement:
    draw = np.random.default_rng(0)
    known_tokens = np.array(sorted(source.tokenizer.get_vocab().values()))
    squares = np.zeros(2)
    largest = 0.0
    same = []
    for length in sorted({min(length, positions) for length in _LENGTHS}):
        tokens = draw.choice(known_tokens, length)
        with torch.no_grad():
            wanted = reference(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
        got = runtime.logits(tokens.tolist())
        difference = got - wanted
        largest = max(largest, float(np.abs(difference).max()))
        squares += [spread(difference), spread(wanted)]
        same.extend(got.argmax(-1) == wanted.argmax(-1))
    return Agreement(float(np.sqrt(squares[0] / squares[1])), largest, float(np.mean(same)))


def spread(logits: NDArray[np.float32]) -> float:
    """Sum of squares; what is added to all logits of a position alike changes nothing."""
    centred = logits.astype(np.float64) - logits.mean(-1, keepdims=True)
    return float(np.square(centred).sum())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
