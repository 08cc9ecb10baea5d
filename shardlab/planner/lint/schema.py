"""The keys that DeepSpeed and accelerate know, read from their own source.

DeepSpeed's sections are pydantic models. Importing them means importing torch and DeepSpeed, four seconds and, on some
machines, a compiler; their source says the same at once. A test holds what is read here against the models themselves.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

_LIMITS = ("gt", "ge", "lt", "le")


@dataclass(frozen=True)
class Key:
    """One key of a section: how it is written, what may stand there."""

    name: str
    annotation: str  # as in the source: "int", "Optional[bool]"
    limits: dict[str, float] = field(default_factory=dict)  # gt, ge, lt, le
    default: Any = None  # None too where it is not a plain value
    choices: tuple[Any, ...] = ()
    replacement: str | None = None  # of a deprecated key
    section: "dict[str, Key] | None" = None


def package(name: str) -> Path | None:
    """The directory of an installed package, which is not imported; None if it isn't there."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@lru_cache
def deepspeed_section(file: str, name: str) -> dict[str, Key]:
    """The keys of the pydantic model `name` in DeepSpeed's `file`, by every name that it takes. {} without DeepSpeed.

    A field with an alias (`stage3_prefetch_bucket_size`) is taken by its own name too.
    """
    root = package("deepspeed")
    if root is None or not (root / file).exists():
        return {}
    classes = _classes(root / file)
    keys: dict[str, Key] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            keys |= deepspeed_section(file, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            key, own = _key(node, node.target.id, root, file)
            keys[key.name] = keys[own] = key
    return keys


def _key(node: ast.AnnAssign, own: str, root: Path, file: str) -> tuple[Key, str]:
    annotation = ast.unparse(node.annotation)
    given = _arguments(node.value)
    extra = given.get("json_schema_extra", {})
    classes = dict(_imported(root, file))
    inner = annotation.removeprefix("Optional[").removesuffix("]")
    limits = {name: given[name] for name in _LIMITS if name in given}
    home = classes.get(inner)
    section = choices = None
    if home is not None:
        choices = _choices(_classes(root / home)[inner])
        section = None if choices else deepspeed_section(home, inner)
    return (
        Key(
            name=given.get("alias", own),
            annotation=annotation,
            limits=limits,
            default=given.get("default"),
            choices=choices or (),
            replacement=extra.get("new_param") if extra.get("deprecated") else None,
            section=section or None,
        ),
        own,
    )


def _arguments(value: ast.expr | None) -> dict[str, Any]:
    """The literal arguments of `Field(default, alias=…)`, the default by that name; or the plain default."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field"):
        return {} if value is None else {"default": _literal(value)}
    given = {keyword.arg: _literal(keyword.value) for keyword in value.keywords if keyword.arg is not None}
    if value.args:
        given["default"] = _literal(value.args[0])
    return given


def _literal(node: ast.expr) -> Any:
    """The value of a literal, of `pp_int(literal)`, and of the literal parts of a dictionary; else None."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pp_int":
        value = _literal(node.args[0])
        return int(value) if isinstance(value, int | float) else None
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key): _literal(value) for key, value in pairs if key is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@lru_cache
def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(file).body if isinstance(node, ast.ClassDef)}


@lru_cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imported(root: Path, file: str) -> Iterator[tuple[str, str]]:
    """(class, file that defines it) of DeepSpeed's own classes that `file` can name."""
    for name in _classes(root / file):
        yield name, file
    for node in _tree(root / file).body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        base = Path(file).parent if node.level == 1 else Path()
        module = base / node.module.removeprefix("deepspeed.").replace(".", "/")
        target = module.with_name(module.name + ".py").as_posix()
        if (node.level == 1 or node.module.startswith("deepspeed.")) and (root / target).exists():
            known = _classes(root / target)
            yield from ((alias.name, target) for alias in node.names if alias.name in known)


def _choices(definition: ast.ClassDef) -> tuple[Any, ...]:
    """The values of an Enum, () for any other class."""
    if not any(ast.unparse(base) == "Enum" for base in definition.bases):
        return ()
    members = [node for node in definition.body if isinstance(node, ast.Assign)]
    return tuple(dict.fromkeys(_literal(node.value) for node in members))


@lru_cache
def accelerate_keys() -> dict[str, frozenset[str]]:
    """By section of an accelerate file ("" is the top level), the keys that `accelerate launch` knows.

    The top level is the ClusterConfig dataclass. A section's keys are set as the launch command's arguments, so those
    are its keys. {} without accelerate.
    """
    root = package("accelerate")
    if root is None:
        return {}
    config = _classes(root / "commands/config/config_args.py")
    top = [
        node.target.id
        for name in ("BaseConfig", "ClusterConfig")
        for node in config[name].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    arguments = list(_launch_arguments(root))
    sections = {"": frozenset({*top, "fp16", "dynamo_backend"})}  # the last two in the manner of earlier versions
    sections["deepspeed_config"] = frozenset(name for group, name in arguments if group == "deepspeed_args")
    # (Not fp8_config: accelerate's own questionnaire writes keys there that its launcher does not read.)
    for prefix in ("fsdp", "dynamo", "parallelism_config", "megatron_lm", "mpirun"):
        key = prefix if prefix.endswith("config") else f"{prefix}_config"
        sections[key] = frozenset(name for _, name in arguments if name.startswith(f"{prefix}_"))
    sections["fsdp_config"] |= {"fsdp_ignored_modules"}  # read, though there is no such argument
    return sections


def accelerate_distributed_types() -> tuple[str, ...]:
    """What `distributed_type` may be. () without accelerate."""
    root = package("accelerate")
    return () if root is None else _choices_of(root / "utils/dataclasses.py", "DistributedType")


def _choices_of(file: Path, name: str) -> tuple[str, ...]:
    members = [node for node in _classes(file)[name].body if isinstance(node, ast.Assign)]
    return tuple(_literal(node.value) for node in members)


def _launch_arguments(root: Path) -> Iterator[tuple[str, str]]:
    """(variable of the argument group, name) of each `--name` of `accelerate launch`."""
    for node in ast.walk(_tree(root / "commands/launch.py")):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "add_argument" and isinstance(node.func.value, ast.Name) and node.args:
            name = _literal(node.args[0])
            if isinstance(name, str) and name.startswith("--"):
                yield node.func.value.id, name.removeprefix("--").replace("-", "_")
