"""The last blocks' own activations in a file, for them not to be run again in the backward pass.

Such a block runs with a graph in the forward pass. What the graph saves lies in the file (see `backends.activations`),
its weights are those that the segment is bound to, and of its input and output only the places are kept.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardlab.backends.activations import DiskShelf, DiskShelves
from shardlab.model.segments import Capture
from shardlab.model.trainable import CausalLM


@dataclass
class _Forward:
    """One micro-batch's forward pass through one block."""

    input: Tensor  # a leaf of the input's shape without memory, which gets its gradient
    output: GradientEdge
    shelf: DiskShelf


class Spill:
    """Of the blocks from number `first` on."""

    def __init__(self, module: CausalLM, first: int, shelves: DiskShelves, nothing: Tensor):
        """`nothing` is one element of the type that computes."""
        self.first = first
        self._shelves = shelves
        self._nothing = nothing
        self._passes: dict[int, list[_Forward]] = {}
        module.set_shelves(shelves, first)

    def forward(self, number: int, block: nn.Module, capture: Capture, hidden: Tensor, *, further: bool) -> Tensor:
        """The output of block `number` for one micro-batch; `further`: its input has a gradient."""
        value = hidden.detach().requires_grad_(further)
        with torch.enable_grad():
            output = capture.run_block(number, block, value)
        shelf = self._shelves.last()
        assert shelf is not None
        self._passes.setdefault(number, []).append(_Forward(value, get_gradient_edge(output), shelf))
        value.data = self._nothing.expand(value.shape)
        return output.detach()

    def turn(self) -> None:
        """The forward pass is over: the last block comes first, its micro-batches in the same order as before."""
        shelves = [one.shelf for number in sorted(self._passes, reverse=True) for one in self._passes[number]]
        for one, after in pairwise(shelves):
            one.follows = weakref.ref(after)
        if shelves:
            self._shelves.load(shelves[0])

    def backward(self, number: int, gradients: list[Tensor]) -> Iterator[Tensor | None]:
        """Each micro-batch's gradient of the block's input, from that of its output; its weights' are added up."""
        for one, gradient in zip(self._passes.pop(number), gradients, strict=True):
            torch.autograd.backward([one.output], [gradient])
            yield one.input.grad

    def clear(self) -> None:
        """Forget what was not asked for."""
        self._passes.clear()

    @property
    def bytes_moved(self) -> int:
        """To and from the file so far."""
        return self._shelves.bytes_moved

    def close(self) -> None:
        """The file goes."""
        self.clear()
        self._shelves.close()
