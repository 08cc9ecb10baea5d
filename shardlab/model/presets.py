"""Llama-like models by size. Parameters are counted with the vocabulary in parentheses."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # 0.13M (257)
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # 6.0M (8192)
    "6m": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    # 152M (32000)
    "150m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
}
COMMON: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": True}
