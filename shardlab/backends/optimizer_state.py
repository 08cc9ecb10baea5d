"""An optimizer's own state by the names of the model's tensors, whichever class of torch's it is.

What has the shape of the tensor it belongs to is a per-element state (`exp_avg`, `momentum_buffer`); a number is a
scalar (`step`). An optimizer makes its state in its first update, each class in its own way: so to load, it is made
to do one, of a tensor of a few elements, and what comes of that is the pattern.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlab.errors import UserError
from shardlab.state.fragment import OptimizerState, StateReader
from shardlab.state.held import VALUES

_NOT_OPTIONS = ("params", "names", "param_names")


@dataclass(frozen=True)
class Owner:
    """A tensor that the optimizer updates, its group, and the names of the model's tensors with elements in it.

    One name, except in ZeRO, where a flat tensor holds this rank's part of many.
    """

    tensor: Tensor
    group: int
    names: tuple[str, ...]


def owners(optimizer: Optimizer) -> list[Owner]:
    """The owners of an optimizer that holds the model's tensors one by one."""
    return [
        Owner(parameter, index, (name,))
        for index, group in enumerate(optimizer.param_groups)
        for name, parameter in zip(group["names"], group["params"], strict=True)
    ]


def moments(optimizer: Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """The per-element states of `tensor` by kind; empty before its first update."""
    return {
        kind: value
        for kind, value in optimizer.state.get(tensor, {}).items()
        if isinstance(value, Tensor) and value.shape == tensor.shape and not _is_scalar(kind, value, tensor)
    }


def _is_scalar(kind: str, value: Any, tensor: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and (kind == "step" or tensor.dim() > 0)
    return isinstance(value, int | float)


def _scalars(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    """The numbers kept for `tensor` by kind.

    Raises UserError where there is a state of another shape (a factored second moment): its elements belong to no box.
    """
    kinds = moments(optimizer, tensor)
    numbers = {k: v for k, v in optimizer.state.get(tensor, {}).items() if k not in kinds and v is not None}
    for kind, value in numbers.items():
        if not _is_scalar(kind, value, tensor):
            raise UserError(
                f"checkpoints can't hold the state {kind!r} of {type(optimizer).__name__}: it has not its tensor's "
                "shape; choose an optimizer whose states have (torch's AdamW, SGD, ...)"
            )
    return numbers


def read_state(optimizer: Optimizer, owned: Sequence[Owner]) -> OptimizerState:
    """See `Backend.optimizer_state`."""
    kinds: dict[str, None] = {}
    scalars: dict[str, dict[str, float]] = {}
    for owner in owned:
        kinds.update(dict.fromkeys(moments(optimizer, owner.tensor)))
        numbers = {kind: float(value) for kind, value in _scalars(optimizer, owner.tensor).items()}
        if numbers:
            scalars.update((name, numbers) for name in owner.names)
    return OptimizerState(tuple(kinds), scalars, plain_groups(optimizer))


def plain_groups(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    """The optimizer's groups: the names in each, and its options."""
    return tuple(
        {"names": tuple(group["names"])} | {k: _plain(v) for k, v in group.items() if k not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    )


def _plain(option: Any) -> Any:
    if isinstance(option, Tensor):
        return option.item()
    return tuple(map(_plain, option)) if isinstance(option, list | tuple) else option


def make_state(optimizer: Optimizer, owned: Iterable[Owner], reader: StateReader) -> None:
    """Make the state that `reader` has of each owner: its numbers as they were, its per-element states still empty.

    Of an owner of several tensors those without moments in the reader start from zero at the owner's step count,
    which is the highest of theirs.

    Raises UserError where the reader's state is another optimizer's.
    """
    for owner in owned:
        stored = {name: reader.kinds(name).difference(VALUES) for name in owner.names}
        numbers = [reader.optimizer.scalars[name] for name in owner.names if name in reader.optimizer.scalars]
        if not numbers and not any(stored.values()):
            continue
        if not optimizer.state.get(owner.tensor):  # some make it when they are built
            optimizer.state[owner.tensor] = _empty_state(optimizer, owner)
        kinds = moments(optimizer, owner.tensor)
        for name, there in stored.items():
            if there or name in reader.optimizer.scalars:
                check_kinds(name, there, kinds, optimizer)
        for kind, value in _scalars(optimizer, owner.tensor).items():
            stored_numbers = [number[kind] for number in numbers if kind in number]
            optimizer.state[owner.tensor][kind] = _number_like(value, kind, owner, stored_numbers)


def check_kinds(name: str, there: Iterable[str], kinds: Iterable[str], optimizer: Optimizer) -> None:
    """Raises UserError where a checkpoint has other states of the tensor `name` than the optimizer keeps."""
    if set(there) != set(kinds):
        raise UserError(
            f"the checkpoint's optimizer keeps {_list(there)} of {name}, and this run's "
            f"{type(optimizer).__name__} {_list(kinds)}: resume with the optimizer that it was saved with"
        )


def _list(kinds: Iterable[str]) -> str:
    return ", ".join(sorted(kinds)) or "nothing"


def _empty_state(optimizer: Optimizer, owner: Owner) -> dict[str, Any]:
    """What the optimizer would keep of the owner's tensor after an update, filled with zeros."""
    like, groups = owner.tensor, optimizer.param_groups
    sample = torch.zeros((2,) * like.dim(), dtype=like.dtype, device=like.device, requires_grad=True)
    sample.grad = torch.zeros_like(sample)
    optimizer.param_groups = [{**groups[owner.group], "params": [sample]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    kinds = moments(optimizer, sample)
    return {
        kind: torch.zeros_like(like, dtype=value.dtype) if kind in kinds else value
        for kind, value in optimizer.state.pop(sample, {}).items()
    }


def _number_like(value: Any, kind: str, owner: Owner, stored: list[float]) -> Any:
    """The stored number as the optimizer keeps it: a tensor of the same type and place, or a Python number."""
    if not stored:
        raise UserError(
            f"the checkpoint has moments of {owner.names[0]}, but not the number {kind!r} that goes with them"
        )
    number = max(stored)
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)
