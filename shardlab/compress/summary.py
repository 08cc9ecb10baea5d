"""A card's figures for people."""

from collections.abc import Mapping
from typing import Any


def quality_lines(figures: Mapping[str, Any]) -> list[str]:
    """What a change costs on held-out text."""
    perplexity = figures["perplexity"]
    change = perplexity["after"] / perplexity["before"] - 1
    return [
        f"perplexity {perplexity['before']:.3f} -> {perplexity['after']:.3f} ({change:+.2%}) "
        f"over {figures['held_out_tokens']:,} held-out tokens",
        f"likeliest token the same for {figures['top_token_agreement']:.1%}, "
        f"KL divergence {figures['kl_divergence']:.5f}",
    ]


def size_line(figures: Mapping[str, Any]) -> str:
    """What it gains on disk."""
    size = figures["weight_bytes"]
    return (
        f"weights {size['before'] / 2**20:.2f} -> {size['after'] / 2**20:.2f} MiB "
        f"({size['before'] / size['after']:.2f} times smaller)"
    )


def bits_lines(figures: Mapping[str, Any]) -> list[str]:
    """What a weight of the quantized layers takes on the disk."""
    bits = figures.get("bits_per_weight")
    return [] if bits is None else [f"{bits:.3f} bits for a weight of the quantized layers, scales included"]
