"""Training state put together in memory from the fragments of all ranks: a checkpoint without its files."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.state.box import Box
from shardlab.state.fragment import Fragment, OptimizerState


@dataclass(frozen=True)
class Piece:
    """A fragment that travels between processes (a tensor would go by a file descriptor)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    box: Box
    data: NDArray[Any]
    dtype: str

    @classmethod
    def of(cls, fragment: Fragment) -> "Piece":
        """A copy."""
        value = fragment.data.detach().cpu()
        assert tuple(value.shape) == fragment.box.lengths
        assert fragment.box.fits(fragment.shape)
        array = (value.float() if value.is_floating_point() else value).numpy().copy()
        return cls(fragment.name, fragment.kind, fragment.shape, fragment.box, array, str(value.dtype))


@dataclass
class Assembled:
    """A `StateReader`. `tensors[name, kind]` is whole; `dtypes` are those that they were written in."""

    optimizer: OptimizerState
    tensors: dict[tuple[str, str], NDArray[Any]] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)
    elements_read: int = 0

    @classmethod
    def of(cls, pieces: Iterable[Piece], optimizer: OptimizerState) -> "Assembled":
        """From the pieces of all ranks, which must hold every element exactly once."""
        self = cls(optimizer)
        times: dict[tuple[str, str], NDArray[np.int64]] = {}
        for piece in pieces:
            key = piece.name, piece.kind
            if key not in self.tensors:
                self.tensors[key] = np.zeros(piece.shape, piece.data.dtype)
                self.dtypes[key] = piece.dtype
                times[key] = np.zeros(piece.shape, np.int64)
            assert self.tensors[key].shape == piece.shape
            assert self.dtypes[key] == piece.dtype
            self.tensors[key][piece.box.slices] = piece.data
            times[key][piece.box.slices] += 1
        wrong = [key for key, count in times.items() if (count != 1).any()]
        assert wrong == []
        return self

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateReader.shapes`."""
        return {name: value.shape for (name, _), value in self.tensors.items()}

    def kinds(self, name: str) -> set[str]:
        """See `StateReader.kinds`."""
        return {kind for other, kind in self.tensors if other == name}

    def read_into(self, name: str, kind: str, box: Box, destination: Tensor) -> None:
        """See `StateReader.read_into`."""
        assert tuple(destination.shape) == box.lengths
        destination.copy_(torch.as_tensor(self.tensors[name, kind][box.slices]))
        self.elements_read += box.numel
