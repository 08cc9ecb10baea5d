"""A recipe file and `--set` overrides -> a Recipe, and back to YAML.

The YAML read is that of version 1.2's core schema: PyYAML's own rules read `1e-3` as a string, `010` as 8, `1:30` as 90
and `off` as false, each of which has cost somebody a run.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shardlab.errors import UserError
from shardlab.recipe.complaints import explain
from shardlab.recipe.recipe import Recipe
from shardlab.recipe.sections import TOKENIZER_NAMES

# Keys whose values are paths on disk; a tokenizer is one unless it has a name of ours.
_PATH_KEYS = (
    ("model", "config"),
    ("model", "path"),
    ("data", "files"),
    ("data", "evaluation_files"),
    ("data", "tokenizer"),
    ("data", "cache_dir"),
    ("shard", "stream_directory"),
    ("distill", "teacher"),
    ("distill", "cache"),
    ("shard", "offload", "directory"),
)


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, changed by overrides such as `train.steps=50`, of which a later one wins.

    Without a file the defaults are changed.

    An override's value is YAML. Relative paths start at the recipe's directory when they stand in the file, and at the
    working directory when they stand in an override. Raises UserError for whatever a user has to mend.
    """
    file = Path("recipe" if path is None else path)
    tree = {} if path is None else _anchored(_read_mapping(file), file.absolute().parent)
    parsed = [_parse_override(text) for text in overrides]
    for override in parsed:
        _apply(override, tree)
    try:
        return Recipe.model_validate({key: value for key, value in tree.items() if value is not None})
    except ValidationError as error:
        complaint = explain(error, Recipe)
        blamed = [f" with --set {override.text}" for override in parsed if _touches(override.keys, complaint.path)]
        raise UserError(f"{file}{''.join(blamed[-1:])}: {complaint.text}") from error


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults too; reading it gives the same recipe."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def recipe_schema() -> dict[str, Any]:
    """The recipe's JSON schema, for editors and other programs."""
    return Recipe.model_json_schema()


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as another type."""


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?\d+", list("-+0123456789")),
    ("float", r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def _parse_yaml(text: str | bytes, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot read the recipe: {error.strerror}") from error
    tree = _parse_yaml(text, str(file))
    if tree is None:
        raise UserError(f"{file}: the recipe is empty; write at least one key, such as `train: {{steps: 200}}`")
    if not isinstance(tree, dict):
        raise UserError(f"{file}, line 1: a recipe is sections of keys, such as `train:`, not {_yaml_kind(tree)}")
    return tree


def _yaml_kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value}"


@dataclass(frozen=True)
class _Override:
    """`train.steps=50`: where, and what."""

    keys: tuple[str, ...]
    value: Any
    text: str


def _parse_override(text: str) -> _Override:
    target, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in target.split("."))
    if not equals or not all(keys):
        raise UserError(f"--set {text}: expected section.key=value, such as train.steps=50")
    return _Override(keys, _parse_yaml(value, f"--set {text}"), text)


def _apply(override: _Override, tree: dict[str, Any]) -> None:
    value = override.value
    for key in reversed(override.keys):
        value = {key: value}
    value = _anchored(value, Path.cwd())
    node = tree
    for depth, key in enumerate(override.keys[:-1]):
        if node.get(key) is None:
            node[key] = {}
        node, value = node[key], value[key]
        if not isinstance(node, dict):
            section = ".".join(override.keys[: depth + 1])
            raise UserError(f"--set {override.text}: {section} holds a value, not keys; set {section} itself")
    node[override.keys[-1]] = value[override.keys[-1]]


def _touches(keys: tuple[str, ...], path: tuple[str | int, ...]) -> bool:
    """Whether one of the two lies within the other."""
    common = min(len(keys), len(path))
    return common > 0 and keys[:common] == path[:common]


def _anchored(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A copy of the tree whose relative paths start at `base`."""
    copied = copy.deepcopy(dict(tree))
    for *sections, key in _PATH_KEYS:
        keys: Any = copied
        for section in sections:
            keys = keys.get(section) if isinstance(keys, dict) else None
        if not isinstance(keys, dict) or key not in keys:
            continue
        value = keys[key]
        if isinstance(value, list):
            keys[key] = [_absolute(item, base) for item in value]
        elif key != "tokenizer" or not _is_named_tokenizer(value):
            keys[key] = _absolute(value, base)
    return copied


def _is_named_tokenizer(value: Any) -> bool:
    return isinstance(value, str) and (TOKENIZER_NAMES.fullmatch(value) is not None or value.startswith("bpe"))


def _absolute(value: Any, base: Path) -> Any:
    return os.path.join(base, os.path.expanduser(value)) if isinstance(value, str) and value else value
