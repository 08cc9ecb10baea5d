"""Which layer is rounded to what: one scheme for all, other ones by name, and what has to stay as it is.

All of it is decided before anything is computed, so what can't be done is said at once and by name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from shardlab.errors import UserError
from shardlab.model.grid import Grid

DEFAULT_GROUP = {2: 32, 3: 32, 4: 128}  # inputs for each scale; int8 has one for a row
SMALLEST_GROUP = 8

Indivisible = Literal["error", "skip", "smaller", "channel"]

_NAME = re.compile(r"(int([2-8])|w8a8)(?:g(\d+))?")


@dataclass(frozen=True)
class Scheme:
    """`grid` of the weights; `int8_inputs`: inputs are rounded to int8 as they come, a scale for each token."""

    grid: Grid
    int8_inputs: bool = False

    @property
    def name(self) -> str:
        """As it is written in a command."""
        group = "" if self.grid.group_size is None else f"g{self.grid.group_size}"
        kind = "w8a8" if self.int8_inputs else f"int{self.grid.bits}"
        return f"{kind}{group}"


@dataclass(frozen=True)
class Layer:
    """A linear layer that could be quantized, before it is. `name` without `.weight`."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Choice:
    """What becomes of a layer: a scheme, or none and why."""

    scheme: Scheme | None
    reason: str | None = None


def parse_scheme(text: str, group_size: int | None = None) -> Scheme:
    """`int4`, `int8`, `int4g32`, `w8a8`: the scheme of that name.

    `group_size` is taken where the name has none and there is a choice. Raises UserError for another name.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise UserError(f"scheme {text!r}: write int4, any width from int2 to int8, int4g32 for groups, or w8a8")
    kind, width, group = found.groups()
    bits = int(width) if width else 8
    chosen = int(group) if group else group_size if group_size is not None else DEFAULT_GROUP.get(bits)
    if chosen is not None and chosen < 1:
        raise UserError(f"scheme {text!r}: a group has at least one input")
    if kind == "w8a8":
        if group:
            raise UserError("scheme w8a8 has one scale for each output row: runtimes have no other kernel")
        return Scheme(Grid(8), int8_inputs=True)
    return Scheme(Grid(bits, chosen))


def parse_rules(texts: Iterable[str], group_size: int | None = None) -> dict[str, Scheme | None]:
    """`PATTERN=SCHEME` or `PATTERN=none`, in order."""
    rules: dict[str, Scheme | None] = {}
    for text in texts:
        pattern, equals, scheme = text.partition("=")
        if not equals or not pattern:
            raise UserError(f"--local {text!r}: write PATTERN=SCHEME, as '*.down_proj=int8' or '*.layers.0.*=none'")
        rules[pattern] = None if scheme == "none" else parse_scheme(scheme, group_size)
    return rules


def choose(
    layers: Iterable[Layer], scheme: Scheme, rules: Mapping[str, Scheme | None], indivisible: Indivisible = "error"
) -> dict[str, Choice]:
    """A choice for each layer, by name: the last rule whose pattern matches, else `scheme`.

    Raises UserError for a rule that matches nothing, and, with `indivisible` "error", naming every layer whose inputs
    its groups don't divide.
    """
    if indivisible not in get_args(Indivisible):
        raise UserError(f"--on-indivisible {indivisible}: choose one of {', '.join(get_args(Indivisible))}")
    layers = list(layers)
    for pattern in rules:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            names = f"; layers are named like {layers[0].name!r}" if layers else ""
            raise UserError(f"--local {pattern!r} matches no layer{names}")
    choices: dict[str, Choice] = {}
    odd: list[Layer] = []
    for layer in layers:
        matching = [rule for pattern, rule in rules.items() if fnmatchcase(layer.name, pattern)]
        chosen = matching[-1] if matching else scheme
        if chosen is None:
            choices[layer.name] = Choice(None, "by its rule")
        elif chosen.grid.group_size is None or layer.inputs % chosen.grid.group_size == 0:
            choices[layer.name] = Choice(chosen)
        else:
            odd.append(layer)
            choices[layer.name] = _otherwise(layer, chosen, indivisible)
    if odd and indivisible == "error":
        named = ", ".join(f"{layer.name} ({layer.inputs} inputs)" for layer in odd[:8])
        more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
        raise UserError(
            f"groups don't divide {named}{more}: choose a group size that does, or --on-indivisible skip (leave them), "
            "smaller (the largest group that divides) or channel (one scale for a row)"
        )
    return choices


def _otherwise(layer: Layer, scheme: Scheme, policy: Indivisible) -> Choice:
    group = scheme.grid.group_size
    assert group is not None
    if policy == "channel":
        return Choice(replace(scheme, grid=replace(scheme.grid, group_size=None)), f"groups of {group} don't divide")
    if policy == "smaller":
        for smaller in range(group - 1, SMALLEST_GROUP - 1, -1):
            if layer.inputs % smaller == 0:
                grid = replace(scheme.grid, group_size=smaller)
                return Choice(replace(scheme, grid=grid), f"groups of {group} don't divide")
        return Choice(None, f"no group of {SMALLEST_GROUP} to {group} inputs divides its {layer.inputs}")
    return Choice(None, f"groups of {group} don't divide its {layer.inputs} inputs")
