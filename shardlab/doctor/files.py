"""Configuration files: reading them as the tools do that they are written for, and linting them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shardlab.errors import UserError
from shardlab.planner.lint import (
    Finding,
    Sizes,
    lint_accelerate,
    lint_ds_config,
    sizes_from_config,
    sizes_from_weights,
    worst_first,
)


def read_json(file: Path, what: str) -> dict[str, Any]:
    """A JSON object. Raises UserError where there is none, or a key stands twice in it."""
    try:
        values = json.loads(_text(file, what), object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}") from error
    except _TwiceError as error:
        raise UserError(f"{file}: the key {error} stands twice; keep one") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: {what} is an object of keys, not {type(values).__name__}")
    return values


class _TwiceError(Exception):
    pass


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _TwiceError(key)
        seen.add(key)
    return dict(pairs)


def read_yaml(file: Path, what: str) -> dict[str, Any]:
    """A YAML mapping, by PyYAML's own rules, as accelerate reads it. Raises UserError where there is none."""
    try:
        values = yaml.safe_load(_text(file, what))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}: not valid YAML: {error.problem}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: {what} is keys with values, not {type(values).__name__}")
    return values


def _text(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot read {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: {what} is not UTF-8 text") from error


def read_accelerate(file: Path) -> dict[str, Any]:
    """An accelerate file, YAML or JSON."""
    return (read_json if file.suffix == ".json" else read_yaml)(file, "an accelerate config file")


def read_model(path: Path) -> tuple[dict[str, Any], Sizes | None]:
    """(config.json, sizes) of a model directory or of a config.json."""
    config = read_json(path / "config.json" if path.is_dir() else path, "a model's config")
    sizes = sizes_from_weights(path) if path.is_dir() else None
    return config, sizes or sizes_from_config(config)


def lint_files(
    ds_config: Path | None,
    accelerate: Path | None = None,
    model: Path | None = None,
    *,
    ranks: int | None = None,
    allow: Sequence[str] = (),
) -> list[Finding]:
    """Findings on the files given; an accelerate file alone brings the ds_config that it names with it.

    Raises UserError for a file that can't be read.
    """
    config, sizes = (None, None) if model is None else read_model(model)
    values = None if accelerate is None else read_accelerate(accelerate)
    if ds_config is None:
        assert accelerate is not None
        assert values is not None
        ds_config = named_ds_config(values, accelerate)
        if ds_config is None:
            return worst_first(lint_accelerate(values, str(accelerate)))
    return lint_ds_config(
        read_json(ds_config, "a ds_config"),
        values,
        config,
        file=str(ds_config),
        accelerate_file=str(accelerate),
        ranks=ranks,
        sizes=sizes,
        allow=allow,
    )


def named_ds_config(accelerate: Mapping[str, Any], file: Path) -> Path | None:
    """The ds_config that an accelerate file names: a path from the working directory, or else from the file's own."""
    plugin = accelerate.get("deepspeed_config")
    named = plugin.get("deepspeed_config_file") if isinstance(plugin, dict) else None
    if not isinstance(named, str) or named == "none":
        return None
    beside = file.parent / named
    return beside if not Path(named).exists() and beside.exists() else Path(named)
