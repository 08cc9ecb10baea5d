"""Tiny models of many families, as transformers builds them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MODERN: dict[str, Any] = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_MODERN, "head_dim": 8, "sliding_window": 4}


def _opt() -> transformers.PretrainedConfig:
    return transformers.OPTConfig(**_COMMON, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)


def gpt2(dropout: float = 0.0) -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
    )


def llama(*, tied: bool = False, dropout: float = 0.0) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**_MODERN, tie_word_embeddings=tied, attention_dropout=dropout)


def mixtral(*, dropout: float = 0.0) -> transformers.PretrainedConfig:
    """4 experts, top-1."""
    return transformers.MixtralConfig(**_MODERN, num_local_experts=4, num_experts_per_tok=1, attention_dropout=dropout)


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": llama,
    "tied llama": lambda: llama(tied=True),
    "qwen2": lambda: transformers.Qwen2Config(**_MODERN),
    "qwen3": lambda: transformers.Qwen3Config(**_MODERN, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**_MODERN, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(**_GEMMA),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GEMMA),
    "gpt2": gpt2,
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_COMMON, intermediate_size=48),
    "opt": _opt,
    "phi3": lambda: transformers.Phi3Config(**_MODERN),
    "mixtral": mixtral,
    "olmo2": lambda: transformers.Olmo2Config(**_MODERN),
    # Beside the families: those whose configs multiply the logits, which a loss must not leave out.
    "cohere": lambda: transformers.CohereConfig(**_MODERN, logit_scale=0.0625),
    "granite": lambda: transformers.GraniteConfig(**_MODERN, logits_scaling=8.0),
}
TIED = {"tied llama", "gemma2", "gemma3", "gpt2", "opt", "cohere"}


def build(config: transformers.PretrainedConfig, seed: int = 0) -> nn.Module:
    """The model as transformers makes it, in fp32, for training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def batch(rows: int = 2, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Rows of tokens; the first is two documents, of 5 and the rest."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, length + 1), generator=generator)
    positions = torch.arange(length).repeat(rows, 1)
    positions[0, 5:] -= 5
    targets = tokens[:, 1:].clone()
    targets[0, 4] = -100
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "targets": targets}


def inputs(of: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model itself takes of a batch."""
    return {name: value for name, value in of.items() if name != "targets"}
