"""The state of torch's own optimizers, put into a new one: it goes on as the old one would have."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from shardlab.backends.optimizer_state import make_state, moments, owners, read_state
from shardlab.errors import UserError
from shardlab.state.box import whole
from shardlab.state.fragment import MASTER
from shardlab.state.held import Held, fragments_of, read_held
from tests.distributed.reader import Assembled, Piece

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, for-each": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


class Counting(torch.optim.SGD):
    """Keeps its step count as a Python integer, as older optimizers and DeepSpeed's do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.data -= parameter.grad / range(9)[state["step"]]  # an index must be an integer


OPTIMIZERS["a Python number"] = (Counting, {})


def _parameters(seed: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in (("a", (3, 2)), ("b", ()))}


def _train(optimizer: Optimizer, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


def _build(kind: str, seed: int) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    build, options = OPTIMIZERS[kind]
    parameters = _parameters(seed)
    return build([{"params": [p], "names": [n]} for n, p in parameters.items()], lr=1e-2, **options), parameters


def _held(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> list[Held]:
    return [
        Held(name, tuple(p.shape), whole(tuple(p.shape)), {MASTER: p.detach(), **moments(optimizer, p)})  # type: ignore[arg-type]
        for name, p in parameters.items()
    ]


def _state(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> Assembled:
    pieces = map(Piece.of, fragments_of(_held(optimizer, parameters)))
    return Assembled.of(pieces, read_state(optimizer, owners(optimizer)))


@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_goes_on_as_if_nothing_had_happened(kind: str, updates: int) -> None:
    old, before = _build(kind, seed=0)
    _train(old, before, range(updates))
    state = _state(old, before)
    new, after = _build(kind, seed=1)
    make_state(new, owners(new), state)
    read_held(_held(new, after), state)
    again = _state(new, after)
    assert again.optimizer == state.optimizer
    assert all(parameter.grad is None for parameter in after.values())
    _train(old, before, range(updates, updates + 3))
    _train(new, after, range(updates, updates + 3))
    for name, parameter in before.items():
        assert torch.equal(parameter, after[name])


def test_states_that_have_not_their_tensor_s_shape_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adafactor([{"params": [parameter], "names": ["a"]}])
    _train(optimizer, {"a": parameter}, range(1))
    with pytest.raises(UserError, match=r"row_var.*Adafactor"):
        read_state(optimizer, owners(optimizer))


def test_groups_are_told_by_name_with_plain_options() -> None:
    optimizer, _ = _build("AdamW, fused", seed=0)
    groups = read_state(optimizer, owners(optimizer)).groups
    assert [group["names"] for group in groups] == [("a",), ("b",)]
    assert groups[0]["betas"] == (0.9, 0.999)
    assert "params" not in groups[0]
