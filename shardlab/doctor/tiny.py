"""The tiny sibling of a model, and data for it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from shardlab.errors import UserError

VOCABULARY = 64
LENGTH = 24
# By the names that families use; only those that a family has are set.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64,
    "d_model": 32, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 16,
    # Large weights: gradients are then far above any limit that clips, which so shows.
    "initializer_range": 0.2, "init_std": 0.2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Lists with an entry per layer, and scaling that goes with other sizes.
_DROPPED = ("layer_types", "rope_scaling", "rope_parameters", "quantization_config", "max_window_layers", "torch_dtype")


def tiny_model(config: Mapping[str, Any] | None) -> nn.Module:
    """A model of the family of a config.json, a few thousand parameters large; a Llama without one.

    Raises UserError for a family that can't be made small so.
    """
    given = dict(config or {"model_type": "llama"})
    kind = given.get("model_type")
    try:
        known = set(AutoConfig.for_model(str(kind)).to_dict())
        kept = {key: value for key, value in given.items() if key not in (*_DROPPED, "architectures", "dtype")}
        kept |= {key: value for key, value in _SMALL.items() if key in known}
        kept |= {key: 0.0 for key in kept if "drop" in key and isinstance(kept[key], float)}
        small: PretrainedConfig = AutoConfig.for_model(**kept)
        model: nn.Module = AutoModelForCausalLM.from_config(small)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"model: no tiny {kind} can be made of this config ({error}); leave --model out") from error
    return model


def batch(step: int, first: int, sequences: int) -> dict[str, Tensor]:
    """The rows `first` to `first + sequences` of a step's sequences, however they are shared out."""
    rows = [torch.Generator().manual_seed(1_000_003 * step + first + row) for row in range(sequences)]
    tokens = torch.stack([torch.randint(0, VOCABULARY, (LENGTH,), generator=row) for row in rows])
    return {"input_ids": tokens, "labels": tokens}
