"""Write docs/recipe.md from the recipe's own fields, so that it can't drift: python docs/generate_recipe.py"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardlab.recipe import Recipe

HEAD = """# The recipe

`shardlab init` writes one with every key. Values are strict: a number in quotes is refused, and so is an unknown key,
with the nearest known one. Paths in a recipe are relative to its file. `--set a.b=value` overrides one value; the last
one given wins. `shardlab train R --dry-run` prints everything as resolved.

This page is generated from the code (`docs/generate_recipe.py`).

| key | default | meaning |
|---|---|---|
"""
PAGE = Path(__file__).parent / "recipe.md"


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(f"| `{key}` | {default} | {meaning} |" for key, default, meaning in rows(Recipe)) + "\n"


def rows(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, meaning) of each key; a section's alternatives (optimizers, schedules) one by one."""
    for name, field in section.model_fields.items():
        kinds = list(_sections(field.annotation))
        if not kinds:
            yield f"{prefix}{name}", _spelled(field.default), (field.description or "").replace("|", "\\|")
        for kind in kinds:
            variant = kind.model_fields["name"].default if len(kinds) > 1 else None
            label = f"{prefix}{name}" if variant is None else f"{prefix}{name} ({_variant(kind)})"
            yield label, "", (kind.__doc__ or "").split("\n")[0]
            for key, default, meaning in rows(kind, f"{prefix}{name}."):
                if not key.endswith(".name"):
                    yield key, default, meaning


def _variant(kind: type[BaseModel]) -> str:
    return str(get_args(kind.model_fields["name"].annotation)[0])


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field's annotation names, a list of them included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from _sections(argument)


def _spelled(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, tuple):
        default = list(default)
    return f"`{json.dumps(default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
