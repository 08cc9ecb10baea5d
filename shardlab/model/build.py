"""The model that a recipe asks for: its parameters on the meta device, and where their values come from."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
)

from shardlab.errors import UserError
from shardlab.model.attention import NAME, register
from shardlab.model.checkpoint import directory_weights, load_buffers
from shardlab.model.deferred import Weights, build_deferred, meta_parameters
from shardlab.model.lora import AdaptedWeights, inject
from shardlab.model.presets import COMMON, PRESETS
from shardlab.model.teacher import Distillation, distillation
from shardlab.model.trainable import CausalLM
from shardlab.recipe import DistillSection, ModelSection

VOCABULARY_MULTIPLE = 64  # a preset's vocabulary is rounded up to it: the head's matrix product prefers even sizes


def build_model(
    section: ModelSection, *, vocabulary: int, eos_token_id: int | None, sequence_length: int, seed: int
) -> tuple[nn.Module, Weights]:
    """Build `section`'s model for a tokenizer of `vocabulary` entries.

    A vocabulary smaller than the tokenizer's is enlarged here, before anything is sharded; new rows get fresh values.
    Raises UserError for a missing or unreadable source, and for sequences longer than the model's positions.
    """
    if section.builder is not None:
        model, weights = build_deferred(_import_builder(section.builder), seed)
    else:
        config = _config(section, vocabulary, eos_token_id)
        _check_length(config, sequence_length)
        if config.vocab_size < vocabulary:
            config.vocab_size = vocabulary
        model, weights = build_deferred(lambda: _from_config(config, section.attention), seed)
        if section.path is not None:
            weights = directory_weights(Path(section.path), model, weights)
        if section.lora is not None:
            lora = section.lora
            model, adapters = build_deferred(lambda: inject(_from_config(config, section.attention), lora), seed)
            weights = AdaptedWeights(weights, adapters)
        if section.path is not None:
            _load_the_rest(Path(section.path), model)
    freeze(model, section.freeze)
    return model, weights


def build_shell(section: ModelSection, *, vocabulary: int, sequence_length: int) -> nn.Module:
    """`section`'s model without values: its parameters on the meta device, as large and as trainable as in a run.

    No weights are read. Raises UserError as `build_model` does.
    """
    if section.builder is not None:
        build = _import_builder(section.builder)
    else:
        config = _config(section, vocabulary, None)
        _check_length(config, sequence_length)
        config.vocab_size = max(config.vocab_size, vocabulary)
        lora = section.lora

        def build() -> nn.Module:
            model = _from_config(config, section.attention)
            return model if lora is None else inject(model, lora)

    with meta_parameters():
        model = build()
    freeze(model, section.freeze)
    return model


def build_teacher(
    section: DistillSection, student: nn.Module, *, vocabulary: int, sequence_length: int
) -> tuple[Distillation, Weights]:
    """The teacher of `student`, whatever device that is on, for a tokenizer of `vocabulary` entries; and its values.

    Raises UserError for a directory that holds no model to learn from, and where they can't be compared.
    """
    with _told_of_the_teacher():
        source = ModelSection(path=section.teacher)
        model, weights = build_model(source, vocabulary=0, eos_token_id=None, sequence_length=sequence_length, seed=0)
    return distillation(section, model, student, vocabulary), weights


def teacher_alone(section: DistillSection, *, sequence_length: int) -> tuple[CausalLM, Weights]:
    """The teacher as a model to be run forward, with no student in sight; and its values."""
    with _told_of_the_teacher():
        source = ModelSection(path=section.teacher)
        model, weights = build_model(source, vocabulary=0, eos_token_id=None, sequence_length=sequence_length, seed=0)
        return CausalLM(model), weights


def teacher_shell(
    section: DistillSection, student: nn.Module, *, vocabulary: int, sequence_length: int
) -> Distillation:
    """The same without values. No weights are read."""
    with _told_of_the_teacher():
        model = build_shell(ModelSection(path=section.teacher), vocabulary=0, sequence_length=sequence_length)
    return distillation(section, model, student, vocabulary)


@contextmanager
def _told_of_the_teacher() -> Iterator[None]:
    """What is said of a directory names the recipe's key that it came by."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}".replace("model.path", "distill.teacher")) from error


def _load_the_rest(directory: Path, model: Any) -> None:
    """What a directory has beside weights: buffers, and how to generate."""
    load_buffers(directory, model)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Stop training the tensors whose names match. Raises UserError for a pattern that matches none."""
    names = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"model.freeze: {pattern!r} matches no tensor; tensors are named like {next(iter(names))!r}"
            )
        for name in matched:
            names[name].requires_grad_(False)


def _config(section: ModelSection, vocabulary: int, eos_token_id: int | None) -> PretrainedConfig:
    if section.preset is not None:
        rounded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        values = COMMON | PRESETS[section.preset] | {"vocab_size": rounded}
        return AutoConfig.for_model(**_own_tokens(values, eos_token_id))
    key, file = ("model.config", section.config) if section.path is None else ("model.path", section.path)
    path = Path(file or "")
    if section.path is not None:
        path /= "config.json"
        if not path.is_file():
            raise UserError(f"model.path: {section.path} is not a Hugging Face model directory: it has no config.json")
    values = _read_config(key, path)
    if section.path is not None and "quantization_config" in values:
        raise UserError(
            f"model.path: {section.path} is quantized ({values['quantization_config'].get('quant_method')}): its "
            "weights can't be trained. Start from the directory that it was made from"
        )
    try:
        if section.path is not None:
            config = AutoConfig.from_pretrained(section.path)
        else:
            config = AutoConfig.for_model(**_own_tokens(values, eos_token_id))
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{key}: {path} is refused by transformers: {' '.join(str(error).split())}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "vocab_size"):
        raise UserError(
            f"{key}: {path}: model_type {values['model_type']} has no causal language model in transformers; "
            "train it with model.builder, a function that returns your module"
        )
    return config


def _own_tokens(values: dict[str, Any], eos_token_id: int | None) -> dict[str, Any]:
    """Fresh weights go with our tokenizer: a family's default ids would point outside its vocabulary."""
    return {"bos_token_id": None, "eos_token_id": eos_token_id} | values


def _read_config(key: str, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} can't be read as a Hugging Face config: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(f'{key}: {path} has no "model_type", which says what family the model is of')
    if values["model_type"] not in CONFIG_MAPPING:
        raise UserError(f"{key}: {path}: transformers knows no model_type {values['model_type']!r}")
    return values


def _check_length(config: PretrainedConfig, sequence_length: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise UserError(
            f"data.sequence_length {sequence_length} is more than the {positions} positions of the model; "
            f"set data.sequence_length={positions}"
        )


def _from_config(config: PretrainedConfig, attention: str) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if attention == "tiles":
        if model.config._attn_implementation != "sdpa":  # a family that torch's kernel can't serve, such as Gemma 2
            raise UserError(f"model.attention: tiles stands in for torch's kernel, which {config.model_type} can't use")
        register()
        model.set_attn_implementation(NAME)
    return cast(nn.Module, model)


def _import_builder(builder: str) -> Callable[[], nn.Module]:
    module_name, _, function = builder.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own module lies beside the recipe
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.builder: {builder} can't be imported: {error}") from error
    if not callable(found):
        raise UserError(f"model.builder: {builder} is not a function")

    def build() -> nn.Module:
        model = found()
        if not isinstance(model, nn.Module):
            raise UserError(f"model.builder: {builder} returns {type(model).__name__}, not a torch module")
        return model

    return build
