"""Precision and clipping: one owner each, and no default that nobody asked for."""

from collections.abc import Iterator
from typing import Any

from shardlab.planner.lint.finding import AUTO, Finding, described, enabled, is_number, section

_HALVES = ("fp16", "bf16", "bfloat16")


def lint_precision(values: dict[str, Any], file: str) -> Iterator[Finding]:
    """Findings on the precision of a ds_config by itself."""
    on = [name for name in _HALVES if enabled(values, name) and section(values, name).get("enabled") != AUTO]
    if "fp16" in on and len(on) > 1:
        yield Finding(
            "error",
            file,
            "fp16.enabled",
            f"fp16.enabled and {on[1]}.enabled are both true, and DeepSpeed refuses that",
            "keep bf16 on hardware that has it, else fp16",
        )
    if "bf16" in values and "bfloat16" in values:
        yield Finding("error", file, "bfloat16", "bf16 is given too, and bfloat16 is then not read", "keep bf16")


def precision_of(values: dict[str, Any]) -> str:
    """The precision that a ds_config asks for: fp16, bf16, auto, or no."""
    halves = [("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "bfloat16")]
    for word, name in halves:
        if section(values, name).get("enabled") == AUTO:
            return AUTO
        if enabled(values, name):
            return word
    return "no"


def lint_clipping(values: dict[str, Any], file: str) -> Iterator[Finding]:
    """Findings on gradient clipping, which DeepSpeed does at 1.0 unless it is told otherwise."""
    if section(values, "optimizer", "params").get("max_grad_norm") is not None:
        yield Finding(
            "error",
            file,
            "optimizer.params.max_grad_norm",
            "DeepSpeed refuses it as an optimizer's parameter",
            "move the value to gradient_clipping",
        )
    if "gradient_clipping" not in values:
        yield Finding(
            "warning",
            file,
            "gradient_clipping",
            "not given: DeepSpeed then clips the gradient's norm at 1.0",
            "write the limit you mean, 1.0 or 0.0 (off)",
        )
        return
    value = values["gradient_clipping"]
    if value != AUTO and (not is_number(value) or value < 0):
        yield Finding(
            "error", file, "gradient_clipping", f"expected a number of at least 0 (off), got {described(value)}"
        )
