"""Words for what is wrong in a recipe: the key's full path, the value, what was expected, and the nearest known key."""

import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]

# What other tools call a key of ours, where the letters alone would not lead there.
NAMES_ELSEWHERE = {
    "learning_rate": "train.optimizer.lr",
    "max_lr": "train.optimizer.lr",
    "beta1": "train.optimizer.betas",
    "beta2": "train.optimizer.betas",
    "epsilon": "train.optimizer.eps",
    "max_steps": "train.steps",
    "iterations": "train.steps",
    "train_batch_size": "train.global_batch_size",
    "gradient_clipping": "train.clip_grad_norm",
    "max_grad_norm": "train.clip_grad_norm",
    "grad_clip": "train.clip_grad_norm",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "dtype": "train.precision",
    "mixed_precision": "train.precision",
    "eval_steps": "train.evaluate_every",
    "lr_scheduler": "train.schedule",
    "per_device_train_batch_size": "shard.micro_batch",
    "train_micro_batch_size_per_gpu": "shard.micro_batch",
    "gradient_accumulation_steps": "shard.micro_batch",
    "activation_checkpointing": "shard.recompute",
    "gradient_checkpointing": "shard.recompute",
    "num_processes": "shard.world_size",
    "offload_optimizer": "shard.offload.optimizer",
    "offload_param": "shard.offload.parameters",
    "block_size": "data.sequence_length",
    "max_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "sample_packing": "data.packing",
    "text_column": "data.columns.text",
    "dataset_text_field": "data.columns.text",
}


@dataclass(frozen=True)
class Complaint:
    """What is wrong, and the path of the key to which it belongs."""

    path: Path
    text: str


@dataclass(frozen=True)
class _Place:
    """Where one of pydantic's locations leads: the path a user wrote, and what may stand there."""

    path: Path
    sections: tuple[type[BaseModel], ...]  # several: the kinds of one section
    nullable: bool


def explain(error: ValidationError, root: type[BaseModel]) -> Complaint:
    """The first thing wrong, in one line, and how many more there are."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_path(root, detail), []).append(detail)
    path, details = next(iter(by_path.items()))
    text = _unknown_key(path, details[0], root) or _bad_value(_walk(root, details[0]["loc"]), details)
    more = len(by_path) - 1
    return Complaint(path, text + (f" (and {more} more like it to mend)" if more else ""))


def dotted(path: Path) -> str:
    """`("train", "optimizer", "groups", 0, "lr")` -> `train.optimizer.groups[0].lr`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def _path(root: type[BaseModel], detail: ErrorDetails) -> Path:
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return (*_walk(root, location[:-1]).path, location[-1])
    return _walk(root, location).path


def _walk(root: type[BaseModel], location: Path) -> _Place:
    """Follow a location from `root`, leaving out the marks with which pydantic tells a union's members apart."""
    path: list[str | int] = []
    sections: tuple[type[BaseModel], ...] = (root,)
    nullable = False
    for item in location:
        holders = [section for section in sections if item in section.model_fields]
        if holders:
            annotation = holders[0].model_fields[str(item)].annotation
            path.append(item)
            sections = tuple(_sections_in(annotation))
            nullable = type(None) in typing.get_args(annotation)
        elif isinstance(item, int):
            path.append(item)
            nullable = False
        else:
            sections = tuple(section for section in sections if _kind(section) == item)
    return _Place(tuple(path), sections, nullable)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)


def _kind(section: type[BaseModel]) -> str | None:
    """The name by which a section of several kinds is chosen, such as `adamw`."""
    field = section.model_fields.get("name")
    return typing.get_args(field.annotation)[0] if field else None


def _unknown_key(path: Path, detail: ErrorDetails, root: type[BaseModel]) -> str | None:
    if detail["type"] != "extra_forbidden":
        return None
    key, section_path = str(path[-1]), path[:-1]
    kinds = _walk(root, section_path).sections  # every kind of this section, since the path says not which
    (section,) = _walk(root, detail["loc"][:-1]).sections
    owners = [str(_kind(kind)) for kind in kinds if key in kind.model_fields]
    if owners:
        name = dotted((*section_path, "name"))
        return f"{dotted(path)} is a key of {' and '.join(owners)}, not of {_kind(section)}; remove it or change {name}"
    nearest = _nearest_key(key, dotted(section_path), section, root)
    advice = f"did you mean {nearest}?" if nearest else f"known keys here: {', '.join(section.model_fields)}"
    return f"unknown key {dotted(path)}; {advice}"


def _nearest_key(key: str, where: str, section: type[BaseModel], root: type[BaseModel]) -> str | None:
    """A key of this section as it stands, or the full path of one elsewhere."""
    spelled = get_close_matches(key, list(section.model_fields), n=1)
    deepest_first = sorted(_paths(root), key=lambda path: -path.count("."))  # of equal names the shallowest stays
    by_leaf = {path.rpartition(".")[2]: path for path in deepest_first} | NAMES_ELSEWHERE
    elsewhere = by_leaf.get(key)
    if elsewhere is None and not spelled:
        close = get_close_matches(key, list(by_leaf), n=1, cutoff=0.75)
        elsewhere = by_leaf[close[0]] if close else None
    if elsewhere is None:
        return spelled[0] if spelled else None
    section_of, _, leaf = elsewhere.rpartition(".")
    return leaf if section_of == where else elsewhere


def _paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in _sections_in(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a section of keys",
    "union_tag_not_found": "a section of keys",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "too_long": "at most {max_length} values",
    "missing": "a value",
}


def _bad_value(place: _Place, details: list[ErrorDetails]) -> str:
    """Several details are the members of a union, none of which fits."""
    first = details[0]
    where = dotted(place.path)
    context = first.get("ctx", {})
    if first["type"] == "value_error":
        return f"{where}: {context['error']}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "union_tag_invalid":
        expected = context["expected_tags"].replace("'", "")
        return f"{where}.name: expected one of {expected}, got {_described(context['tag'])}"
    if first["type"] == "invalid_key":
        return f"{where or 'top level'}: keys are words, got {_described(first['loc'][-1])}"
    choices = [_expected(detail) for detail in details] + ["null"] * place.nullable
    expected = " or ".join(dict.fromkeys(choices))
    return f"{where}: expected {expected}, got {_described(first['input'])}"


def _expected(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        return str(context["expected"]).replace("'", "")
    return _EXPECTED.get(detail["type"], detail["msg"]).format(**context)


def _described(value: Any) -> str:
    """A value as a user wrote it, with its type where the two are easily confused."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the string {json.dumps(value, ensure_ascii=False)}"
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return str(value)
