"""Tiny model directories to export: random weights large enough that a wrong order of heads shows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
TEXT = "the quick brown fox jumps over the lazy dog; def read(self): return [1, 22, 333]\n"
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama-tied-biased": ("llama", _LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", _LLAMA | {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": (
        "llama",
        _LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3}},
    ),
    "mistral": ("mistral", _LLAMA | {"head_dim": 32, "sliding_window": 48}),
    "qwen2": ("qwen2", _LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 32}),
    "gpt2": ("gpt2", _GPT2),
}


def bpe_tokenizer(size: int, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE of about `size` tokens, and ordinary tokens added to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def save_model(directory: Path, name: str, tokenizer: PreTrainedTokenizerFast, rows: int, **changes: Any) -> Any:
    """Write the model of `CONFIGS` with `rows` tokens, beside its tokenizer; return it."""
    kind, values = CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **(values | {"vocab_size": rows} | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def needs(*modules: str) -> None:
    """Skip where an extra is not installed."""
    for module in modules:
        pytest.importorskip(module)
