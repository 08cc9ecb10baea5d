"""The recipe's `model`: where it comes from, and what of it is trained."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from shardlab.recipe.sections.base import BelowOne, Names, Section


class LoraSection(Section):
    """Low-rank adapters on linear layers; everything else is frozen."""

    rank: PositiveInt = 8
    """Rows of the low-rank factors."""
    alpha: PositiveFloat = 16.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: BelowOne = 0.0
    """On the adapters' input."""
    targets: Literal["all-linear"] | Names = "all-linear"
    """Names of the layers, or their ends, such as q_proj; all-linear is every linear layer but the head."""
    merge: bool = False
    """Save the model with the adapters merged in, instead of an adapter directory."""


class ModelSection(Section):
    """The model to train: exactly one of `preset`, `config`, `path` and `builder`."""

    preset: Literal["tiny", "6m", "150m"] | None = None
    """A Llama-like model of that size; 6m when no other source is given."""
    config: str | None = None
    """A Hugging Face config JSON: the architecture, with fresh weights."""
    path: str | None = None
    """A Hugging Face model directory: the architecture and its weights."""
    builder: str | None = None
    """"package.module:function", called without arguments, returns the model."""
    attention: Literal["torch", "tiles"] = "torch"
    """tiles: on a CPU, a tile of queries at a time without keys that none of them sees; faster in bf16 or packed."""
    freeze: Names = ()
    """Glob patterns of tensor names, as in the Hugging Face model, that are not trained."""
    lora: LoraSection | None = None
    """Train low-rank adapters on a model directory (`path`) instead of its weights; null is off."""

    keep_masks: bool = True
    """What was pruned in `path` stays zero (if it has masks); false trains those weights too, and drops the masks."""

    @model_validator(mode="before")
    @classmethod
    def _default_source(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and all(raw.get(key) is None for key in _MODEL_SOURCES):
            return {**raw, "preset": "6m"}
        return raw

    @model_validator(mode="after")
    def _two_models_at_once(self) -> "ModelSection":
        given = [key for key in _MODEL_SOURCES if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; keep one and set the other to null")
        return self

    @model_validator(mode="after")
    def _adapters_on_random_weights(self) -> "ModelSection":
        if self.lora is not None and self.path is None:
            raise ValueError("lora needs path, a trained model to adapt; fresh weights are trained whole")
        return self

    @model_validator(mode="after")
    def _attention_of_a_module_that_is_not_ours_to_change(self) -> "ModelSection":
        if self.attention != "torch" and self.builder is not None:
            raise ValueError(f"attention {self.attention} is for Hugging Face models; builder decides on its own")
        return self

    @field_validator("builder")
    @classmethod
    def _builder_that_names_no_function(cls, builder: str | None) -> str | None:
        if builder is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", builder):
            raise ValueError(f'expected "package.module:function", got "{builder}"')
        return builder


_MODEL_SOURCES = ("preset", "config", "path", "builder")
