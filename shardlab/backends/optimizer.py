"""The optimizer over a backend's own parameters, grouped by the names in the user's model."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardlab.backends.base import OptimizerFactory, OptimizerSettings
from shardlab.errors import UserError
from shardlab.recipe import SGD, AdamW


def build_optimizer(settings: OptimizerSettings, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """An optimizer whose groups carry `lr_scale` (a group's rate / the recipe's rate): see `set_learning_rate`.

    And `names`, those of its tensors in the user's model.

    Raises UserError where a group's pattern matches no trainable tensor.
    """
    if not isinstance(settings, AdamW | SGD):
        return _with_names(settings, list(named))
    groups = _groups(settings, list(named))
    if isinstance(settings, AdamW):
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


def _with_names(build: OptimizerFactory, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    names = {id(parameter): name for name, parameter in named}
    optimizer = build(named)
    for group in optimizer.param_groups:
        if "names" not in group:
            group["names"] = [names[id(parameter)] for parameter in group["params"]]
    return optimizer


def _groups(settings: AdamW | SGD, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, object]]:
    patterns = [group.pattern for group in settings.groups]
    members: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        index = next((i for i, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), len(patterns))
        members.setdefault(index, []).append((name, parameter))
    for index, pattern in enumerate(patterns):
        if index not in members:
            raise UserError(f"train.optimizer.groups: no trainable tensor is matched first by the pattern {pattern!r}")
    groups: list[dict[str, object]] = []
    for index in sorted(members):
        override = settings.groups[index] if index < len(patterns) else None
        lr = settings.lr if override is None or override.lr is None else override.lr
        decay = override.weight_decay if override is not None else None
        groups.append(
            {
                "params": [parameter for _, parameter in members[index]],
                "names": [name for name, _ in members[index]],
                "weight_decay": settings.weight_decay if decay is None else decay,
                "lr_scale": lr / settings.lr,
            }
        )
    return groups


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group its share of the scheduled rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def like(optimizer: Optimizer, model: nn.Module) -> OptimizerFactory:
    """A factory of optimizers of the same kind, options and groups as `optimizer`, by the names of `model`'s tensors.

    Raises UserError where the optimizer misses a trainable tensor of the model: it would silently stay as it is.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    missing = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing -= {name for members in held for name in members if name is not None}
    if missing:
        raise UserError(
            f"the optimizer does not hold {len(missing)} trainable tensors of the model, among them {min(missing)}: "
            "they would not be trained. Build it from model.parameters() of the model given to Engine.prepare, "
            "before prepare; or freeze them"
        )
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    peak = float(optimizer.defaults["lr"])

    def build(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        parameters = dict(named)
        groups = [
            {
                **group,
                "params": [parameters[name] for name in members if name in parameters],
                "lr_scale": group["lr"] / peak,
            }
            for group, members in zip(options, held, strict=True)
        ]
        built: Optimizer = kind([group for group in groups if group["params"]])
        return built

    return build
