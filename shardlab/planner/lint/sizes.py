"""How large a model is, from its config.json or its weights' headers; no weights are read."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where families keep the width: as they stand, or one level down.
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_NESTED = ("text_config", "decoder")


@dataclass(frozen=True)
class Sizes:
    """Elements of the whole model, and of its largest tensor."""

    parameters: int
    largest: int


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """The width that `auto` is computed from: the widest where there are several; None where none can be found.

    Looked for in hidden_size, hidden_sizes, text_config, decoder, d_model and n_embd, in this order
    (https://github.com/huggingface/transformers/issues/22176).
    """
    if _is_size(config.get("hidden_size")):
        return int(config["hidden_size"])
    several = config.get("hidden_sizes")
    if isinstance(several, list) and several and all(_is_size(size) for size in several):
        return int(max(several))
    for name in _NESTED:
        if isinstance(config.get(name), Mapping):
            inner = hidden_size(config[name])
            if inner is not None:
                return inner
    return _first(config, *_WIDTHS)


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if _is_size(config.get(name))), None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def sizes_from_config(config: Mapping[str, Any]) -> Sizes | None:
    """About how large a decoder of this config is; None where it says too little.

    Exact for Llama-like models: embedding, head, and in each block four attention and three feed-forward matrices.
    """
    nested = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), None)
    if nested is not None and "vocab_size" not in config:
        return sizes_from_config(nested)
    hidden = hidden_size(config)
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    vocabulary = _first(config, "vocab_size")
    if hidden is None or layers is None or vocabulary is None:
        return None
    heads = _first(config, "num_attention_heads", "n_head") or 1
    head_dim = _first(config, "head_dim") or hidden // heads
    shared = _first(config, "num_key_value_heads") or heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * shared * head_dim
    inner = _first(config, "intermediate_size", "n_inner") or 4 * hidden
    experts = _first(config, "num_local_experts", "num_experts") or 1
    matrices = 3 if "intermediate_size" in config else 2
    block = attention + matrices * hidden * inner * experts + 2 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Sizes(embeddings + layers * block + hidden, max(vocabulary * hidden, hidden * inner))


def sizes_from_weights(directory: Path) -> Sizes | None:
    """The sizes in the headers of a model directory's safetensors files; None where there are none to be read."""
    counts = [count for file in sorted(directory.glob("*.safetensors")) for count in _elements(file)]
    return Sizes(sum(counts), max(counts)) if counts else None


def _elements(file: Path) -> list[int]:
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
    except (OSError, ValueError, struct.error):
        return []  # damaged or not such a file: the sizes are then taken from the config
    return [math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
