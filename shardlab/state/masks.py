"""Masks of pruned weights: which elements of a tensor stay, one bit each, kept in a file beside the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from shardlab.errors import UserError
from shardlab.recipe import ModelSection
from shardlab.state.box import Box

MASKS = "shardlab_masks.safetensors"

_PIECE = 1 << 20  # elements whose bits are unpacked at a time
_NOTE = {"packing": "numpy.packbits of whether a weight stays"}


class Masks:
    """By tensor name, whether each element stays; what does not stay is zero. Other tensors are free.

    Bits stay packed, on the CPU: an eighth of a byte for each weight.
    """

    def __init__(self, packed: Mapping[str, Tensor] | None = None):
        """`packed`: as `numpy.packbits` makes them of a flattened tensor."""
        self.packed = dict(packed or {})

    @classmethod
    def of(cls, stays: Mapping[str, Tensor]) -> Masks:
        """From tensors of booleans, shaped like the weights."""
        return cls({name: packed(mask) for name, mask in stays.items()})

    @classmethod
    def read(cls, directory: Path) -> Masks:
        """Those of a model directory or checkpoint; none without such a file. Raises UserError if it is damaged."""
        path = directory / MASKS
        if not path.is_file():
            return cls()
        try:
            return cls(load_file(path))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} can't be read: {error}") from error

    def dump(self) -> bytes:
        """The file's content."""
        return save({name: bits.contiguous() for name, bits in self.packed.items()}, metadata=_NOTE)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, and about those of the file."""
        return sum(bits.nbytes for bits in self.packed.values())

    def __bool__(self) -> bool:
        return bool(self.packed)

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed)

    def checked(self, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]) -> Masks:
        """The same by canonical names. Raises UserError for a tensor that the model lacks, or has in another size."""
        named = {aliases.get(name, name): bits for name, bits in self.packed.items()}
        for name, bits in named.items():
            if name not in shapes:
                raise UserError(f"the masks are of another model: it has no tensor {name}")
            elements = torch.Size(shapes[name]).numel()
            if len(bits) != -(-elements // 8):
                raise UserError(
                    f"the masks are of another model: {name} has {elements} elements, the mask {len(bits)} bytes"
                )
        return Masks(named)

    def counted(self) -> int:
        """Elements that stay zero."""
        return sum(8 * len(bits) - int(np.unpackbits(bits.numpy()).sum()) for bits in self.packed.values())

    def frees(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether any element of a tensor of `shape` may change."""
        return name not in self.packed or bool(self.stays(name, shape).any())

    def stays(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole mask of a tensor of `shape`, booleans."""
        return ~self._gone(name, 0, torch.Size(shape).numel()).view(shape)

    @torch.no_grad()
    def enforce(self, name: str, values: Tensor, start: int = 0) -> None:
        """Set to zero what does not stay of `values`, in place: elements from `start` on of the flattened tensor."""
        if name not in self.packed:
            return
        values = values.detach()
        if not values.is_contiguous():
            values.masked_fill_(self._gone(name, start, values.numel()).to(values.device).view(values.shape), 0)
            return
        flat = values.view(-1)
        for first in range(0, len(flat), _PIECE):
            piece = flat[first : first + _PIECE]
            piece.masked_fill_(self._gone(name, start + first, len(piece)).to(values.device), 0)

    @torch.no_grad()
    def enforce_box(self, name: str, box: Box, shape: tuple[int, ...], values: Tensor) -> None:
        """The same of a box of a tensor of `shape`; `values` has the box's lengths as its shape."""
        if name not in self.packed:
            return
        if not shape:
            self.enforce(name, values)
            return
        row = torch.Size(shape[1:]).numel()
        gone = self._gone(name, box.offsets[0] * row, box.lengths[0] * row).view(box.lengths[0], *shape[1:])
        values.detach().masked_fill_(gone[(slice(None), *box.slices[1:])].to(values.device), 0)

    def _gone(self, name: str, start: int, numel: int) -> Tensor:
        """(numel,) booleans: what does not stay of the elements from `start` on."""
        bits = self.packed[name][start // 8 : -(-(start + numel) // 8)]
        unpacked = np.unpackbits(bits.numpy())[start % 8 : start % 8 + numel]
        return torch.from_numpy(unpacked).view(torch.bool).logical_not_()


def kept_masks(section: ModelSection) -> Masks:
    """Those of the model directory, where the recipe keeps them. Adapters leave the base's zeros alone."""
    if section.path is None or section.lora is not None or not section.keep_masks:
        return Masks()
    return Masks.read(Path(section.path))


def packed(stays: Tensor) -> Tensor:
    """A mask's bits, (ceil(elements / 8),) uint8; those that fill up the last byte are set."""
    bits = stays.detach().reshape(-1).to("cpu", torch.bool)
    filled = torch.nn.functional.pad(bits, (0, -len(bits) % 8), value=True)
    return torch.from_numpy(np.packbits(filled.numpy()))
