"""The model's own parameters over weights that come and go.

Between visits a parameter has its shape and no memory of its own: one element, expanded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardlab.backends.stream.layout import Segment
from shardlab.model.deferred import Weights
from shardlab.model.trainable import Trainable


class Binding:
    """Puts a segment's weights and gradients into the parameters that it is of."""

    def __init__(self, module: Trainable, device: torch.device, dtype: torch.dtype):
        """Replaces every parameter of `module`, in place; ties stay. Values that there were wait for `take_initial`."""
        self._nothing = torch.zeros(1, dtype=dtype, device=device)
        self.parameters: dict[str, nn.Parameter] = {}
        originals = list(module.named_canonical())  # held here, so that no other object takes one's id
        self._initial = {name: parameter.detach() for name, parameter in originals if not parameter.is_meta}
        names = {id(parameter): name for name, parameter in originals}
        for name, parameter in originals:
            made = nn.Parameter(self._nothing.expand(parameter.shape), requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                made.grad_dtype = torch.float32  # gradients are added up in fp32, also of bf16 weights
            self.parameters[name] = made
        for child in module.modules():
            for leaf, held in list(child._parameters.items()):
                if held is not None:
                    child._parameters[leaf] = self.parameters[names[id(held)]]

    def take_initial(self, name: str, weights: Weights) -> Tensor:
        """The value that a parameter had, or, of one on the meta device, the one that `weights` makes. Once each."""
        value = self._initial.pop(name, None)
        return weights.tensor(name) if value is None else value

    @contextmanager
    def bound(self, segment: Segment, weights: Tensor, gradient: Tensor | None = None) -> Iterator[None]:
        """Inside, the segment's whole tensors are views of `weights`, and their gradients of `gradient`."""
        bound = [(self.parameters[part.name], part) for part in segment.parts]
        for parameter, part in bound:
            parameter.data = weights[segment.place(part)].view(part.shape)
            if gradient is not None and part.trained:
                parameter.grad = gradient[part.offset : part.offset + part.numel].view(part.shape)
        try:
            yield
        finally:
            for parameter, part in bound:
                parameter.grad = None
                parameter.data = self._nothing.expand(part.shape)


def gradients(segment: Segment, gradient: Tensor) -> Mapping[str, Tensor]:
    """The gradients of a segment's tensors by name, as views (of ranges of them: flat ones)."""
    return {p.name: gradient[p.offset : p.offset + p.numel] for p in segment.parts if p.trained}
