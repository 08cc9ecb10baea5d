"""Equal units of a block that can go altogether: the channels of an MLP, the key-value groups of an attention.

A unit is some output rows of the layers before the middle, and the inputs of the layer behind it that these make.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardlab.compress.sparsity import without_inputs
from shardlab.compress.walk import Walk
from shardlab.errors import UserError

By = Literal["influence", "activation", "magnitude"]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Units:
    """`count` units of one block. `before`: a layer's name -> its output rows of one unit; `behind` has `width` inputs
    of each."""

    behind: str
    width: int
    before: Mapping[str, int]
    count: int

    def shapes(self, shapes: Mapping[str, torch.Size], kept: int) -> dict[str, torch.Size]:
        """Of the tensors that change where `kept` units stay."""
        changed = {}
        for layer, rows in self.before.items():
            for name in (f"{layer}.weight", f"{layer}.bias"):
                if name in shapes:
                    changed[name] = torch.Size((kept * rows, *shapes[name][1:]))
        name = f"{self.behind}.weight"
        changed[name] = torch.Size((shapes[name][0], kept * self.width))
        return changed


def channels(walk: Walk, config: Mapping[str, Any]) -> list[Units]:
    """Of each block's MLP. Raises UserError for MLPs that are not linear layers of the config's one width."""
    width = config.get("intermediate_size")
    found = []
    for linears in walk.linears_of_blocks():
        before = {name: 1 for name, (outputs, _) in linears.items() if outputs == width}
        behind = [name for name, (_, inputs) in linears.items() if inputs == width]
        if not isinstance(width, int) or not before or len(behind) != 1:
            raise UserError(
                "the channels are not known: not every block has an MLP of linear layers of config.json's "
                f"intermediate_size ({width})"
            )
        found.append(Units(behind[0], 1, before, width))
    if width == walk.head()[1][1]:
        raise UserError(f"the MLPs are as wide as the model ({width}): their channels can't be told from others")
    return found


def head_size(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(query heads, key-value heads, values of one) by config.json. Raises UserError where it does not say."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise UserError("config.json has no num_attention_heads and hidden_size: its heads are not known")
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads


def groups(walk: Walk, config: Mapping[str, Any]) -> list[Units]:
    """Of each block's attention: a key-value head with the query heads that share it. Raises UserError for others."""
    heads, pairs, size = head_size(config)
    wanted = dict(zip(_PROJECTIONS, (heads * size, pairs * size, pairs * size, heads * size), strict=True))
    found = []
    for index, linears in enumerate(walk.linears_of_blocks()):
        by_leaf = {name.rpartition(".")[2]: name for name in linears}
        for leaf, rows in wanted.items():
            name = by_leaf.get(leaf)
            if name is None or linears[name][leaf == "o_proj"] != rows:
                raise UserError(
                    f"the key-value groups are not known: block {index} has no {leaf} of {rows} values, which {heads} "
                    f"heads and {pairs} key-value heads of {size} would have"
                )
        q, k, v, o = (by_leaf[leaf] for leaf in _PROJECTIONS)
        shared = heads // pairs * size
        found.append(Units(o, shared, {q: shared, k: size, v: size}, pairs))
    return found


def config_of_groups(config: Mapping[str, Any], kept: int) -> dict[str, Any]:
    """`config` for `kept` key-value groups, the size of a head stated: it would follow from their number."""
    heads, pairs, size = head_size(config)
    return {
        **config,
        "num_attention_heads": heads // pairs * kept,
        "num_key_value_heads": kept,
        "head_dim": size,
    }


def unit_scores(units: Units, linears: Mapping[str, nn.Linear], by: By, moment: Tensor | None) -> Tensor:
    """What each unit matters, (count,): the smallest goes first.

    influence: the mean square of what it adds to the output of the layer behind, by itself; activation: the mean
    square of its values; magnitude: the squares of its weights. `moment` is the second moment of that layer's inputs.
    """
    weight = linears[units.behind].weight.detach()
    if by == "magnitude" or moment is None:
        each = weight.square().sum(0).reshape(units.count, -1).sum(1)
        for name in units.before:
            each = each + linears[name].weight.detach().square().sum(1).reshape(units.count, -1).sum(1)
        return each
    if by == "activation":
        return moment.diagonal().reshape(units.count, -1).sum(1)
    scores = []
    for unit in range(units.count):
        place = slice(unit * units.width, (unit + 1) * units.width)
        part = weight[:, place]
        scores.append(((part @ moment[place, place]) * part).sum())
    return torch.stack(scores)


def cut(units: Units, linears: Mapping[str, nn.Linear], keep: Tensor, moment: Tensor | None) -> dict[str, Tensor]:
    """{tensor's name: its values where the units `keep` stay}, of those that change.

    With `moment` what the layer behind loses is made up for by the inputs that it keeps.
    """
    last = linears[units.behind].weight.detach()
    inputs = elements(keep, units.width)
    shorter = last[:, inputs] if moment is None else without_inputs(last, moment, inputs)
    changed = {f"{units.behind}.weight": shorter.contiguous()}
    for name, rows in units.before.items():
        for leaf, parameter in linears[name].named_parameters(recurse=False):
            changed[f"{name}.{leaf}"] = parameter.detach()[elements(keep, rows)].contiguous()
    return changed


def elements(keep: Tensor, width: int) -> Tensor:
    """The places of all elements of the units `keep`, each `width` elements."""
    inside = torch.arange(width, device=keep.device)
    return (keep[:, None] * width + inside).flatten()


def averaged_heads(tensor: Tensor, heads: int, kept: int) -> Tensor:
    """Keys' or values' weights (heads * size, ...) with neighbouring heads averaged to `kept` (arXiv 2305.13245).

    The query heads stay: each `heads / kept` key-value heads become one. Raises ValueError where they don't divide.
    """
    if heads % kept:
        raise ValueError(f"{heads} heads can't be averaged to {kept}")
    size = tensor.shape[0] // heads
    return tensor.reshape(kept, heads // kept, size, *tensor.shape[1:]).mean(1).reshape(kept * size, *tensor.shape[1:])
