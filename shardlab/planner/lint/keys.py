"""Keys that nobody reads, at any level, and values that are not of their kind."""

import operator
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardlab.planner.lint.finding import AUTO, Finding, described
from shardlab.planner.lint.schema import Key, deepspeed_section, package
from shardlab.planner.lint.tables import MODELS, NAMES_ELSEWHERE, REMOVED, REMOVED_FROM_ZERO, SECTIONS, TOP_LEVEL

# Annotations of DeepSpeed's fields whose values are checked; all others are left to DeepSpeed.
_KINDS: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "str": (str, "a string"),
    "Optional[bool]": (bool | None, "true or false"),
    "Optional[int]": (int | None, "an integer"),
    "Optional[str]": (str | None, "a string"),
    "Optional[Path]": (Path | None, "a path"),
    "list": (list, "a list"),
}
_LIMITS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "gt": ("above", operator.gt),
    "ge": ("of at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("of at most", operator.le),
}


def lint_keys(values: dict[str, Any], file: str, allow: Sequence[str] = ()) -> Iterator[Finding]:
    """Findings on the keys and kinds of a ds_config. `allow` are glob patterns of key paths to pass over."""
    if package("deepspeed") is None:
        yield Finding("note", file, "", "DeepSpeed is not installed, so the keys of its sections can't be checked here")
    for finding in _mapping(values, (), file):
        if not any(fnmatchcase(finding.key, pattern) for pattern in allow):
            yield finding


def known_keys(path: tuple[str, ...]) -> dict[str, Key] | frozenset[str] | None:
    """What may stand in the section at `path`: keys with their kinds, names only, or None where anything may."""
    if path in MODELS:
        return deepspeed_section(*MODELS[path]) or None
    if path in SECTIONS:
        return SECTIONS[path]
    if path == ():
        return TOP_LEVEL | {section[0] for section in (*MODELS, *SECTIONS)}
    for length in range(len(path) - 1, 0, -1):  # within a model
        keys: Any = deepspeed_section(*MODELS[path[:length]]) if path[:length] in MODELS else {}
        for name in path[length:]:
            keys = keys[name].section if keys and name in keys else None
        if keys:
            return dict(keys)
    return None


def _mapping(values: dict[str, Any], path: tuple[str, ...], file: str) -> Iterator[Finding]:
    known = known_keys(path)
    for name, value in values.items():
        here = (*path, name)
        if known is not None and name not in known:
            yield _unknown(here, known, file)
        elif isinstance(known, dict):
            yield from _field(known[name], here, value, file)
        elif isinstance(value, dict):
            yield from _mapping(value, here, file)
        elif here in MODELS or here in SECTIONS:
            if here == ("zero_optimization",) and isinstance(value, bool):
                yield Finding(
                    "warning", file, name, "true or false is the form of early versions", 'write {"stage": 1} or more'
                )
            elif SECTIONS.get(here, frozenset()) is not None:
                yield Finding("error", file, ".".join(here), f"expected a section of keys, got {described(value)}")


def _field(key: Key, here: tuple[str, ...], value: Any, file: str) -> Iterator[Finding]:
    path = ".".join(here)
    if key.replacement is not None:
        yield Finding("warning", file, path, "deprecated", f"use {'.'.join(here[:-1])}.{key.replacement}")
        return
    if key.section is not None and isinstance(value, dict):
        yield from _mapping(value, here, file)
        return
    if value == AUTO or (value is None and key.annotation.startswith("Optional[")):
        return
    expected = _expected(key, value)
    if expected is not None:
        yield Finding("error", file, path, f"expected {expected}, got {described(value)}")


def _expected(key: Key, value: Any) -> str | None:
    """What was expected instead of `value`; None where it is right, or not to be judged here."""
    if key.section is not None:
        return "a section of keys"
    if key.choices:
        return None if value in key.choices and not isinstance(value, bool) else f"one of {_listed(key.choices)}"
    if key.annotation not in _KINDS:
        return None
    kind, words = _KINDS[key.annotation]
    expected = " ".join([words, *(f"{_LIMITS[name][0]} {limit:g}" for name, limit in key.limits.items())])
    try:
        read = TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return expected
    return None if all(_LIMITS[name][1](read, limit) for name, limit in key.limits.items()) else expected


def _listed(choices: Sequence[Any]) -> str:
    return ", ".join(str(choice) for choice in choices)


def _unknown(here: tuple[str, ...], known: dict[str, Key] | frozenset[str], file: str) -> Finding:
    path, name = ".".join(here), here[-1]
    removed = {(): REMOVED, ("zero_optimization",): REMOVED_FROM_ZERO}.get(here[:-1], {}).get(name)
    if removed is not None:
        return Finding("error", file, path, f"DeepSpeed no longer has {removed} and refuses the key", "remove it")
    nearest = _nearest(here, known)
    silent = "" if isinstance(known, dict) else ", and DeepSpeed passes over it in silence"
    fix = f"did you mean {nearest}?" if nearest else f"known here: {', '.join(sorted(known))}"
    return Finding("error", file, path, f"unknown key{silent}", fix)


def _nearest(here: tuple[str, ...], known: dict[str, Key] | frozenset[str]) -> str | None:
    """A key of this section as it stands, or the path of one elsewhere."""
    name = here[-1]
    close = get_close_matches(name, list(known), n=1, cutoff=0.85)
    if close:
        return close[0]
    if name in NAMES_ELSEWHERE:
        return NAMES_ELSEWHERE[name]
    elsewhere = _by_leaf()
    if name in elsewhere:
        return elsewhere[name]
    close = get_close_matches(name, list(known), n=1) or get_close_matches(name, list(elsewhere), n=1, cutoff=0.8)
    return None if not close else close[0] if close[0] in known else elsewhere[close[0]]


@lru_cache
def _by_leaf() -> dict[str, str]:
    """Full paths by last name; of equal names the shallowest."""
    paths: list[tuple[str, ...]] = [(name,) for name in TOP_LEVEL]
    for section, keys in SECTIONS.items():
        paths += [section, *((*section, name) for name in keys or ())]
    for section, model in MODELS.items():
        paths += [section, *_paths(section, deepspeed_section(*model))]
    return {path[-1]: ".".join(path) for path in sorted(paths, key=len, reverse=True)}


def _paths(section: tuple[str, ...], keys: dict[str, Key]) -> Iterator[tuple[str, ...]]:
    for key in keys.values():
        yield (*section, key.name)
        yield from _paths((*section, key.name), key.section or {})
