"""LoRA adapters (Hu et al., 2021) through peft: put into the model in place, saved apart or merged.

The model keeps its own class, so segments, sharding and recompute know nothing of adapters: the base is frozen, the
adapters are trainable tensors of their layers' units.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.errors import UserError
from shardlab.model.deferred import Weights
from shardlab.model.trainable import Trainable
from shardlab.recipe import LoraSection

_BASE = ".base_layer"
_ADAPTER = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])\.default\.weight")


def inject(model: nn.Module, section: LoraSection) -> nn.Module:
    """Add adapters to `model`'s linear layers in place and freeze the rest.

    Raises UserError where peft is missing or no layer has one of the target names.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("model.lora needs peft: `pip install 'shardlab[lora]'`") from error
    config = LoraConfig(**_options(section))
    try:
        injected: nn.Module = inject_adapter_in_model(config, model)
    except ValueError as error:
        raise UserError(f"model.lora.targets: {error}") from error
    return injected


def _options(section: LoraSection) -> dict[str, Any]:
    targets = "all-linear" if section.targets == "all-linear" else list(section.targets)
    return {
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }


class AdaptedWeights:
    """Initial values of a model with adapters: the base's own, and fresh adapters (which change nothing at first)."""

    def __init__(self, base: Weights, adapters: Weights):
        self._base = base
        self._adapters = adapters

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        if _ADAPTER.fullmatch(name):
            return self._adapters.tensor(name)
        return self._base.tensor(name.replace(_BASE, ""))


def adapter_name(name: str) -> str | None:
    """The name that peft's files have for an adapter's tensor; None for any other tensor."""
    return f"base_model.model.{name.replace('.default.', '.')}" if _ADAPTER.fullmatch(name) else None


def adapter_tensors(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone, by the names that peft's files have."""
    for name, tensor in tensors:
        key = adapter_name(name)
        if key is not None:
            yield key, tensor


def transposed_layers(module: Trainable) -> set[str]:
    """The adapted layers that keep their weight as (in, out), as transformers' Conv1D (GPT-2) does."""
    owners = [name for name, layer in module.named_modules() if getattr(layer, "fan_in_fan_out", False)]
    return {module.canonical[f"{name}{_BASE}.weight"].removesuffix(f"{_BASE}.weight") for name in owners}


def merged_tensors(
    tensors: Iterator[tuple[str, Tensor]], section: LoraSection, transposed: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The base model's tensors, each adapted weight W as W + alpha / rank x B A, by the base model's names.

    `transposed` are the layers whose W is (in, out): where it is square, its shape does not tell. At most one
    layer's three tensors are held at a time, if they come one after another.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        adapter = _ADAPTER.fullmatch(name)
        if adapter is not None:
            layer, part = adapter["layer"], adapter["factor"]
        elif name.endswith(f"{_BASE}.weight"):
            layer, part = name.removesuffix(f"{_BASE}.weight"), "W"
        else:
            yield name.replace(_BASE, ""), tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 3:
            del waiting[layer]
            yield f"{layer}.weight", _merge(parts, section.alpha / section.rank, layer in transposed)


def _merge(parts: dict[str, Tensor], scale: float, transposed: bool) -> Tensor:
    weight = parts["W"]
    update = parts["B"].float() @ parts["A"].float()
    update = update.t() if transposed else update
    return (weight.float() + scale * update).to(weight.dtype)


def write_adapter_config(directory: Path, section: LoraSection, base: str, targets: list[str]) -> None:
    """adapter_config.json as peft reads it, with the layers that were adapted by name."""
    from peft import LoraConfig

    config = LoraConfig(**{**_options(section), "target_modules": targets}, base_model_name_or_path=base)
    config.inference_mode = True
    config.save_pretrained(directory)
    written = json.loads((directory / "adapter_config.json").read_text())
    if written["base_model_name_or_path"] != base:
        raise RuntimeError("peft did not keep the base model's path")


def adapted_layers(names: Iterator[str]) -> list[str]:
    """The layers that have an adapter, among all tensors' names."""
    return sorted({match["layer"] for name in names if (match := _ADAPTER.fullmatch(name)) is not None})


def merge_directory(adapter: Path, output: Path) -> None:
    """Write the model that an adapter directory and its base make. Raises UserError if it is none, or output exists."""
    if not (adapter / "adapter_config.json").is_file():
        raise UserError(f"{adapter} is not an adapter directory: it has no adapter_config.json")
    if output.exists():
        raise UserError(f"{output} exists; it is never overwritten. Remove it or choose another directory")
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="auto")
    with torch.no_grad():
        merged = model.merge_and_unload()
    merged.save_pretrained(output)
    if (adapter / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(adapter).save_pretrained(output)
