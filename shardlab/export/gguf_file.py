"""A GGUF file, written front to back: header, metadata, a table of the tensors, their data, a piece of one at a time.

Layout as ggml's docs/gguf.md has it, version 3, little-endian. Read back with the `gguf` package, whose reader shares
nothing with this.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.errors import UserError
from shardlab.export.source import require

GgufDtype = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"]

Value = int | float | bool | str | Sequence[int] | Sequence[str]
"""Of metadata. An int is written as uint32, a float as float32, a list of ints as int32."""

BLOCK = 32  # elements of a row that share a scale

_ALIGNMENT = 32
_PIECE = 1 << 22  # elements converted at a time
_TYPES: dict[GgufDtype, tuple[int, int, int]] = {  # ggml's number; bytes of so many elements
    "f32": (0, 4, 1),
    "f16": (1, 2, 1),
    "bf16": (30, 2, 1),
    "q8_0": (8, 34, BLOCK),
    "q4_0": (2, 18, BLOCK),
    "q4_1": (3, 20, BLOCK),
}
FILE_TYPES: dict[GgufDtype, int] = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3}
"""llama.cpp's numbers for what most tensors of a file are (`general.file_type`)."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file, and where its values come from."""

    name: str
    shape: tuple[int, ...]  # as torch has it; the file lists it backwards
    dtype: GgufDtype
    load: Callable[[], Tensor]  # fp32, of `shape`

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        _, size, elements = _TYPES[self.dtype]
        return int(np.prod(self.shape)) // elements * size


def parse_dtype(text: str) -> GgufDtype:
    """`text` as a dtype of a GGUF file. Raises UserError for any other."""
    for known in get_args(GgufDtype):
        if text == known:
            return known
    raise UserError(f"--dtype {text}: for gguf choose one of {', '.join(get_args(GgufDtype))}")


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[GgufTensor]) -> None:
    """Write the file. Raises UserError for a tensor with a value that is not finite in its dtype, naming it."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _typed(value))
        offset = 0
        for tensor in tensors:
            dims = tensor.shape[::-1]
            numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, _TYPES[tensor.dtype][0], offset)
            file.write(_string(tensor.name) + numbers)
            offset += -(-tensor.bytes // _ALIGNMENT) * _ALIGNMENT
        _pad(file)
        for tensor in tensors:
            for piece in pieces(tensor.load()):
                file.write(_encode(piece, tensor).data)
            _pad(file)


def pieces(value: Tensor) -> Iterator[Tensor]:
    """`value` cut along its first dim, so that its conversion takes little memory."""
    yield from value.split(max(1, _PIECE // max(1, value[0].numel())))


def _encode(piece: Tensor, tensor: GgufTensor) -> NDArray[np.generic]:
    if tensor.dtype == "bf16":
        stored = piece.to(torch.bfloat16)
    elif tensor.dtype == "f32":
        stored = piece
    else:
        stored = piece.to(torch.float16)  # quantized blocks have scales of this type: the same range
    if not torch.isfinite(stored).all():
        kind = "f16" if torch.isfinite(piece).all() else tensor.dtype
        raise UserError(
            f"{tensor.name} has values that are not finite in {kind}; choose --dtype bf16 or f32 or mend it"
        )
    if tensor.dtype in ("f32", "f16"):
        return stored.contiguous().numpy()
    if tensor.dtype == "bf16":
        return stored.contiguous().view(torch.int16).numpy()
    gguf = require("gguf")
    blocks: NDArray[np.generic] = gguf.quantize(
        piece.contiguous().numpy(), gguf.GGMLQuantizationType(_TYPES[tensor.dtype][0])
    )
    return blocks


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Value) -> bytes:
    """A value after the number of its type: 4 uint32, 5 int32, 6 float32, 7 bool, 8 string, 9 array."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_strings(value))
    return struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, dtype="<i4").tobytes()


def _strings(values: Iterable[object]) -> Iterator[bytes]:
    for value in values:
        yield _string(str(value))


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
