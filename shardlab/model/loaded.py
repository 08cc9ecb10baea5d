"""Weights that are in memory for a while: a frozen model is run forward one segment after another."""

from collections.abc import Mapping

import torch
from torch import nn

from shardlab.model.deferred import Weights
from shardlab.model.trainable import CausalLM


class Loaded:
    """A module's parameters with their values inside, and without memory again afterwards.

    `names` are those of the model's empty parameters by identity. `parameters` are the real ones, by the same names.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[int, str],
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        self._module = module
        self._names = names
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._empty: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.parameters: dict[str, nn.Parameter] = {}

    def __enter__(self) -> "Loaded":
        made: dict[int, nn.Parameter] = {}
        for module in self._module.modules():
            for leaf, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                self._empty.append((module, leaf, parameter))
                if id(parameter) not in made:
                    name = self._names[id(parameter)]
                    value = self._weights.tensor(name)
                    value = value.to(self._device, self._dtype if value.is_floating_point() else value.dtype)
                    made[id(parameter)] = self.parameters[name] = nn.Parameter(value, requires_grad=False)
                module._parameters[leaf] = made[id(parameter)]
        return self

    def __exit__(self, *_: object) -> None:
        for module, leaf, parameter in self._empty:
            module._parameters[leaf] = parameter


def names_by_identity(model: CausalLM) -> dict[int, str]:
    """For `Loaded`: to be asked before any parameter is replaced by one with values."""
    return {id(parameter): name for name, parameter in model.named_canonical()}


def around_blocks(model: CausalLM) -> nn.Module:
    """The body without its blocks, as one module."""
    inside = {id(module) for block in model.blocks for module in block.modules()}
    return nn.ModuleList(m for m in model.body.modules() if id(m) not in inside and m._parameters)
