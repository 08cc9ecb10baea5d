"""Put values into a module's parameters, one unit at a time."""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from shardlab.model.deferred import Weights
from shardlab.model.teacher import Teacher
from shardlab.plan import Plan


class Named(Protocol):
    """A module that knows its parameters' names in files."""

    def named_canonical(self) -> Iterable[tuple[str, nn.Parameter]]: ...


class Materializer:
    """Gives parameters their initial values, each tied one once, whatever the order of the units.

    `frozen`: the type of what is not trained, if it is another: converted later it would first be there as `dtype`.
    """

    def __init__(
        self,
        trainable: Named,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        frozen: torch.dtype | None = None,
    ):
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._frozen = frozen or dtype
        self._originals = list(trainable.named_canonical())  # kept, so that no other object takes one's id
        self._names = {id(parameter): name for name, parameter in self._originals}
        # Only as long as the module has them: held here, what a backend has sharded would stay whole.
        self._made: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()

    def materialize(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Replace every parameter of `module` that has no values here yet by a real one, in place."""
        for child in module.modules() if recurse else [module]:
            for leaf, parameter in list(child._parameters.items()):
                if parameter is not None and id(parameter) in self._names:
                    child._parameters[leaf] = self._real(parameter)

    def _real(self, parameter: nn.Parameter) -> nn.Parameter:
        key = id(parameter)
        made = self._made.get(key)
        if made is None:
            value = self._weights.tensor(self._names[key]) if parameter.is_meta else parameter.detach()
            wanted = self._dtype if parameter.requires_grad else self._frozen
            dtype = wanted if value.is_floating_point() else value.dtype
            # FSDP2 refuses a tensor that is not contiguous, and ZeRO flattens each: so none is, on any backend.
            value = value.to(self._device, dtype).contiguous()
            made = self._made[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        return made


def hold_whole(teacher: Teacher, weights: Weights, device: torch.device, plan: Plan) -> None:
    """Materialise a teacher that every rank holds whole, in the type that computes."""
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    Materializer(teacher, weights, device, dtype).materialize(teacher)
    move_buffers(teacher, device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers were computed by the model's own constructor, on the CPU; parameters are not touched."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
