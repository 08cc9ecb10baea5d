"""Second moments of what linear layers are given, gathered by hooks while rows go through them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Moments:
    """`with Moments(linears) as m: observe()`: afterwards `m.get(name)` is (inputs, inputs), fp32, per token.

    Layers that are given the same tensor (query, key, value) share one.
    """

    def __init__(self, linears: dict[str, nn.Linear]):
        self._linears = linears
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._shared: dict[str, str] = {}  # layer -> the first one that is given the same
        self._last: tuple[str, Tensor] | None = None

    def __enter__(self) -> "Moments":
        self._hooks = [linear.register_forward_pre_hook(self._hook(name)) for name, linear in self._linears.items()]
        return self

    def __exit__(self, *_: object) -> None:
        self._last = None
        for hook in self._hooks:
            hook.remove()

    def get(self, name: str) -> Tensor | None:
        """Of layer `name`; None where it was given nothing, such as an expert that no token chose."""
        owner = self._shared.get(name, name)
        return self._sums[owner] / self._tokens[owner] if owner in self._sums else None

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            given = arguments[0]
            if self._last is not None and self._last[1] is given and self._last[0] != name:
                if name not in self._sums:
                    self._shared[name] = self._last[0]
                return
            owner = name
            self._last = (owner, given)
            rows = given.detach().reshape(-1, given.shape[-1]).float()
            if owner not in self._sums:
                self._sums[owner] = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
                self._tokens[owner] = 0
            self._sums[owner].addmm_(rows.T, rows)
            self._tokens[owner] += rows.shape[0]

        return add
