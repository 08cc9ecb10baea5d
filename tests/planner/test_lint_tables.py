"""The linter's tables against the libraries themselves: a key that a new version brings, or drops, shows here."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType
from deepspeed.runtime import config as deepspeed_config

from shardlab.planner.lint.keys import lint_keys
from shardlab.planner.lint.schema import Key, accelerate_distributed_types, accelerate_keys, deepspeed_section
from shardlab.planner.lint.tables import MODELS, REMOVED, REMOVED_FROM_ZERO, SECTIONS, TOP_LEVEL, stages_of


def pairs(read: dict[str, Key], model: Any) -> Iterator[tuple[dict[str, Key], Any]]:
    """The section read from the source and the model, and so for each section within."""
    yield read, model
    for name, field in model.model_fields.items():
        for kind in getattr(field.annotation, "__args__", (field.annotation,)):
            if hasattr(kind, "model_fields"):
                yield from pairs(read[name].section or {}, kind)


@pytest.mark.parametrize("path", MODELS, ids=".".join)
def test_sections_read_from_the_source_are_deepspeeds_models(path: tuple[str, ...]) -> None:
    file, name = MODELS[path]
    module = importlib.import_module("deepspeed." + file.removesuffix(".py").replace("/", "."))
    for read, model in pairs(deepspeed_section(file, name), getattr(module, name)):
        names = {name for own, field in model.model_fields.items() for name in (own, field.alias or own)}
        assert set(read) == names
        for own, field in model.model_fields.items():
            deprecated = bool((field.json_schema_extra or {}).get("deprecated"))
            assert (read[own].replacement is not None) == deprecated
            limits = {kind: getattr(one, kind) for one in field.metadata for kind in ("gt", "ge", "lt", "le")
                      if hasattr(one, kind)}  # fmt: skip
            assert read[own].limits == limits


class Recorder(dict):  # type: ignore[type-arg]
    """A ds_config that remembers which keys were looked up."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.looked_up: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looked_up.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        keys = super().keys()
        outer = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                outer.looked_up.add(str(key))
                return key in keys

            def __iter__(self) -> Iterator[Any]:
                return iter(keys)

        return Keys()

    def __copy__(self) -> "Recorder":
        return self


def test_every_top_level_key_that_deepspeed_looks_up_is_known() -> None:
    recorder = Recorder({"train_batch_size": 1})
    deepspeed_config.DeepSpeedConfig(recorder)
    known = TOP_LEVEL | {path[0] for path in (*MODELS, *SECTIONS)} | set(REMOVED)
    assert recorder.looked_up - known == set()
    # And it does look: the test would be void if the class stopped asking its dictionary.
    assert {"gradient_clipping", "zero_optimization", "flops_profiler"} <= recorder.looked_up


def test_blocks_that_deepspeed_refuses_are_known() -> None:
    assert set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == set(REMOVED)
    assert set(deepspeed_config._REMOVED_ZERO_CONFIG_KEYS) == set(REMOVED_FROM_ZERO)


def test_deepspeeds_own_templates_have_no_unknown_key() -> None:
    templates = sorted((Path(deepspeed.__file__).parent / "autotuning/config_templates").glob("*.json"))
    assert templates
    for template in templates:
        assert [one for one in lint_keys(json.loads(template.read_text()), "x") if "unknown" in one.message] == []


def test_every_key_of_zero_optimization_has_a_stage_that_is_one() -> None:
    for name in deepspeed_section(*MODELS["zero_optimization",]):
        assert set(stages_of(name)) <= {0, 1, 2, 3}


def test_accelerates_keys_are_those_of_its_dataclass() -> None:
    assert accelerate_keys()[""] == set(ClusterConfig.__dataclass_fields__) | {"fp16", "dynamo_backend"}
    assert set(accelerate_distributed_types()) == {kind.value for kind in DistributedType}
    assert {"zero_stage", "deepspeed_config_file"} <= accelerate_keys()["deepspeed_config"]
    assert {"fsdp_version", "fsdp_offload_params"} <= accelerate_keys()["fsdp_config"]
