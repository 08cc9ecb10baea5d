"""What a block's forward pass saves for its backward pass, kept elsewhere in between: on the host, on the disk.

torch hands each tensor that autograd saves to a hook, and asks another for it later. Not everything is worth moving:
weights are there anyway (and may be gathered or read anew by then), and what the block is called with beside its hidden
state, a mask say, is the same for all blocks. What is left goes to a `Shelf`, each memory once however many views of it
are saved.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


class Shelf(Protocol):
    """A place for what one forward pass of one block saves."""

    def put(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        """Keep a copy of all of `storage`; the number that `get` knows it by."""
        ...

    def end(self) -> None:
        """The forward pass is over: nothing more is put."""
        ...

    def get(self, number: int) -> Tensor:
        """Its bytes (uint8) on the device that they came from; valid until the block's backward pass is over."""
        ...


class Shelves(Protocol):
    """Where shelves come from."""

    def begin(self) -> Shelf:
        """One for the forward pass that begins."""
        ...


@dataclass(frozen=True)
class _View:
    """Of a memory that was put on the shelf, or of a weight."""

    of: int | nn.Parameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Saved:
    """The hooks for one forward pass of `block`; `beside`: what it is called with beside the hidden state."""

    def __init__(self, shelf: Shelf, block: nn.Module, beside: Iterable[Any]):
        self._shelf = shelf
        self._weights = list(block.parameters())
        self._beside = {_memory(one) for one in tree_leaves(list(beside)) if isinstance(one, Tensor)}
        # By memory and by how often it was changed. A weak reference keeps a memory's number from being used again.
        self._numbers: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, what autograd saves goes to the shelf."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        self._numbers.clear()
        self._shelf.end()

    def pack(self, tensor: Tensor) -> Any:
        """What is to be remembered instead of `tensor`; the tensor itself where it stays."""
        if isinstance(tensor, nn.Parameter) or not _plain(tensor):
            return tensor
        weight = self._weight_of(tensor)
        if weight is not None:
            return _view(tensor, weight, tensor.storage_offset() - weight.storage_offset())
        memory = _memory(tensor)
        if memory in self._beside:
            return tensor
        known = self._numbers.get((memory, tensor._version))
        if known is None or known[0].expired():
            storage = tensor.untyped_storage()
            known = StorageWeakRef(storage), self._shelf.put(storage, tensor.device)
            self._numbers[memory, tensor._version] = known
        return _view(tensor, known[1], tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""
        if not isinstance(packed, _View):
            found: Tensor = packed
            return found
        if isinstance(packed.of, nn.Parameter):
            weight = packed.of.detach()
            return weight.as_strided(packed.size, packed.stride, weight.storage_offset() + packed.offset)
        data = self._shelf.get(packed.of)
        whole = data[: len(data) // packed.dtype.itemsize * packed.dtype.itemsize].view(packed.dtype)
        return whole.as_strided(packed.size, packed.stride, whole.storage_offset() + packed.offset)

    def _weight_of(self, tensor: Tensor) -> nn.Parameter | None:
        """The weight that `tensor` is a view of."""
        memory, offset = _memory(tensor), tensor.storage_offset()
        for weight in self._weights:
            if weight.dtype == tensor.dtype and _memory(weight) == memory:
                begin = weight.storage_offset()
                if begin <= offset < begin + weight.numel():  # several may lie in one memory
                    return weight
        return None


def _plain(tensor: Tensor) -> bool:
    """Whether its memory is all there is to it."""
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_conj() and not tensor.is_neg()


def _view(tensor: Tensor, of: int | nn.Parameter, offset: Any) -> _View:
    return _View(of, tensor.dtype, tensor.size(), tensor.stride(), offset)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
