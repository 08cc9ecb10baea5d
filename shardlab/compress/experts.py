"""Experts of a mixture go: rows of the tensors that transformers fuses them into, and of the router."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.compress.units import By
from shardlab.compress.walk import Segment, Walk
from shardlab.errors import UserError

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class Experts:
    """Of one block: the names of the tensors with a row for each. `module` holds the experts' own."""

    module: str
    tensors: tuple[str, ...]
    router: tuple[str, ...]
    count: int

    def shapes(self, shapes: Mapping[str, torch.Size], kept: int) -> dict[str, torch.Size]:
        """Of the tensors that change where `kept` experts stay."""
        return {name: torch.Size((kept, *shapes[name][1:])) for name in (*self.tensors, *self.router)}


def experts_of(walk: Walk, config: Mapping[str, Any]) -> list[Experts | None]:
    """Of each block; None for one that has none, such as a dense one. Raises UserError for a model without any."""
    count = next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), None)
    found = [_of_block(walk.block_shapes(index), count) for index in range(walk.blocks)]
    if count is None or not any(found):
        raise UserError(
            "the model has no experts: it takes a mixture whose experts are fused in tensors (Mixtral, Qwen)"
        )
    return found


def _of_block(shapes: Mapping[str, torch.Size], count: int | None) -> Experts | None:
    tensors = tuple(n for n, shape in shapes.items() if _EXPERTS in n and len(shape) == 3 and shape[0] == count)
    if not tensors or count is None:
        return None
    parent = tensors[0].partition(_EXPERTS)[0]
    router = tuple(
        name
        for name, shape in shapes.items()
        # A layer right beside the experts with a row for each.
        if name.startswith(f"{parent}.") and _EXPERTS not in name and name.count(".") == parent.count(".") + 2
        if shape[0] == count
    )
    if not router:
        raise UserError(f"{parent} has no router with a row for each of its {count} experts")
    return Experts(f"{parent}{_EXPERTS}".rstrip("."), tensors, router, count)


def config_of_experts(config: Mapping[str, Any], kept: int) -> dict[str, Any]:
    """`config` for `kept` experts. Raises UserError where a token goes to more than that."""
    chosen = config.get("num_experts_per_tok", 1)
    if kept < chosen:
        raise UserError(f"{kept} experts would be left, and each token goes to {chosen}")
    return {**config, **{key: kept for key in _COUNTS if key in config}}


def expert_scores(experts: Experts, segment: Segment, by: By) -> Tensor:
    """What each expert matters, (count,).

    influence: the mean square of what it adds to a token's output, weighed by the router; activation: the weight that
    the router gives it, over all tokens; magnitude: the squares of its weights.
    """
    if by == "magnitude":
        squares = [segment.parameters[name].detach().square().flatten(1).sum(1) for name in experts.tensors]
        return torch.stack(squares).sum(0)
    module = segment.module.get_submodule(experts.module.removeprefix(f"{segment.name}."))
    scores = torch.zeros(experts.count, dtype=torch.float64)
    inside = False

    def see(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        hidden, chosen, weights = arguments
        for expert in range(experts.count):
            mine = chosen == expert
            tokens = mine.any(-1)
            if by == "activation":
                scores[expert] += float((weights * mine).double().sum())
            elif bool(tokens.any()):
                alone = (weights * mine)[tokens]
                scores[expert] += float(module(hidden[tokens], chosen[tokens], alone).double().square().sum())
        inside = False

    hook = module.register_forward_pre_hook(see)
    segment.observe()
    hook.remove()
    return scores


def cut_experts(experts: Experts, segment: Segment, keep: Tensor) -> dict[str, Tensor]:
    """{tensor's name: its rows of the experts `keep`}; the block's modules are told the new number."""
    for module in segment.module.modules():
        if getattr(module, "num_experts", None) == experts.count:
            module.num_experts = len(keep)  # type: ignore[assignment]
    return {n: segment.parameters[n].detach()[keep].contiguous() for n in (*experts.tensors, *experts.router)}
