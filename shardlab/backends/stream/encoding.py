"""How numbers of the training state lie in its files: fp32 as they are, bf16, or 8-bit codes with a scale a block.

All arithmetic is done in fp32: an encoded plane is decoded and encoded again a few thousand elements at a time. bf16 is
rounded stochastically, so that updates smaller than half a digit count on average. The 8-bit codes are those of
block-wise dynamic quantization (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization"), as bitsandbytes
and torchao have them: blocks of 256 elements divided by their largest, then the nearest of 256 values that are dense
near zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from shardlab.backends.stream.direct import SECTOR, aligned
from shardlab.backends.stream.layout import ALIGN

BLOCK = ALIGN  # elements of a scale: tensors begin at one, so that none shares it
CHUNK = 64 * 1024  # elements that are decoded at a time: they stay in a core's cache
LEAST_PIECE = BLOCK * SECTOR // 4  # elements whose scales fill a sector: pieces of a plane are multiples of it

Masters = Literal["fp32", "bf16"]
Moments = Literal["fp32", "8bit"]


@dataclass(frozen=True)
class Field:
    """One number of `dtype` for every `per` elements."""

    dtype: torch.dtype
    per: int = 1

    def count(self, elements: int) -> int:
        """Numbers of so many elements, a multiple of `per`."""
        return elements // self.per

    def size(self, elements: int) -> int:
        """Bytes of them in a file or a buffer: whole sectors."""
        return -(-self.count(elements) * self.dtype.itemsize // SECTOR) * SECTOR


class Scratch:
    """What decoding and encoding need beside the numbers, for one thread; `generator` rounds."""

    def __init__(self) -> None:
        self._numbers = aligned(CHUNK)
        self.generator = torch.Generator()

    def floats(self, count: int) -> Tensor:
        """fp32, of any values."""
        return self._numbers[:count]

    def integers(self, count: int) -> Tensor:
        """int32, in the same memory."""
        return self._numbers[:count].view(torch.int32)


class Encoding(Protocol):
    """One plane's; `raw` are its fields as they lie in a file, for the same elements as `values` (fp32)."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """What is stored."""
        ...

    def decode(self, raw: Sequence[Tensor], values: Tensor, scratch: Scratch) -> Tensor:
        """The numbers: in `values`, or where `raw` holds them as they are, `raw` itself."""
        ...

    def encode(self, values: Tensor, raw: Sequence[Tensor], scratch: Scratch, *, nearest: bool = False) -> None:
        """Write what `decode` returned and was then changed. `values` is spoilt; `nearest`: rounded without chance."""
        ...


class Exact:
    """fp32."""

    fields = (Field(torch.float32),)

    def decode(self, raw: Sequence[Tensor], values: Tensor, scratch: Scratch) -> Tensor:
        """See `Encoding.decode`."""
        return raw[0]

    def encode(self, values: Tensor, raw: Sequence[Tensor], scratch: Scratch, *, nearest: bool = False) -> None:
        """See `Encoding.encode`."""
        if values.data_ptr() != raw[0].data_ptr():
            raw[0].copy_(values)


class Bfloat16:
    """bf16, rounded up or down with the odds of its distance to each."""

    fields = (Field(torch.bfloat16),)

    def decode(self, raw: Sequence[Tensor], values: Tensor, scratch: Scratch) -> Tensor:
        """See `Encoding.decode`."""
        return values.copy_(raw[0])

    def encode(self, values: Tensor, raw: Sequence[Tensor], scratch: Scratch, *, nearest: bool = False) -> None:
        """See `Encoding.encode`."""
        if nearest:
            raw[0].copy_(values)
            return
        noise = torch.empty(-(-len(values) // 4), dtype=torch.int64)
        noise.random_(-(2**63), None, generator=scratch.generator)  # all 64 bits
        low = scratch.integers(len(values))
        low.copy_(noise.view(torch.int16)[: len(values)]).bitwise_and_(0xFFFF)
        bits = values.view(torch.int32).add_(low).bitwise_right_shift_(16)
        raw[0].view(torch.int16).copy_(bits)


@dataclass(frozen=True)
class Blockwise8:
    """8 bits an element and a scale a block; `signed` where values may be negative."""

    signed: bool
    fields: tuple[Field, ...] = (Field(torch.uint8), Field(torch.float32, BLOCK))

    def decode(self, raw: Sequence[Tensor], values: Tensor, scratch: Scratch) -> Tensor:
        """See `Encoding.decode`."""
        codes, scales = raw
        index = scratch.integers(len(values)).copy_(codes)
        torch.index_select(dynamic_map(self.signed), 0, index, out=values)
        values.view(-1, BLOCK).mul_(scales.unsqueeze(1))
        return values

    def encode(self, values: Tensor, raw: Sequence[Tensor], scratch: Scratch, *, nearest: bool = False) -> None:
        """See `Encoding.encode`."""
        codes, scales = raw
        blocks = values.view(-1, BLOCK)
        torch.amax(torch.abs(blocks, out=scratch.floats(len(values)).view(-1, BLOCK)), 1, out=scales)
        blocks.div_(scales.clamp_(min=1e-12).unsqueeze(1))
        index = values.view(torch.int32).bitwise_right_shift_(_DROPPED_BITS).bitwise_and_((1 << _KEPT_BITS) - 1)
        torch.index_select(_codes(self.signed), 0, index, out=codes)


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values that codes stand for, ascending: per power of ten twice as many as for the one below it."""
    values = [0.0, 1.0]
    for exponent in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1, dtype=torch.float64)
        middles = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


# A code is looked up by a number's first bits (sign, exponent, 11 of the mantissa): a search for the nearest took 50
# times as long. Within 2^-12 of the middle between two values the farther one may be taken.
_KEPT_BITS, _DROPPED_BITS = 20, 12


@cache
def _codes(signed: bool) -> Tensor:
    """For each of the numbers' first 20 bits the code of the nearest value."""
    first = torch.arange(1 << _KEPT_BITS, dtype=torch.int32)
    numbers = (first.bitwise_left_shift(_DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))).view(torch.float32)
    values = dynamic_map(signed)
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(numbers.nan_to_num().clamp(-1, 1), middles).to(torch.uint8)


@dataclass(frozen=True)
class Format:
    """What is kept of each element in the files.

    `states`: the optimizer's moments, of which AdamW's second is never negative; `frozen`: what frozen tensors compute
    in; `gradients`: what a window's gradients wait in.
    """

    states: int
    frozen: torch.dtype
    masters: Masters = "fp32"
    moments: Moments = "fp32"
    gradients: Masters = "fp32"
    planes: tuple[Encoding, ...] = field(init=False)

    def __post_init__(self) -> None:
        planes: list[Encoding] = [Bfloat16() if self.masters == "bf16" else Exact()]
        for number in range(self.states):
            planes.append(Blockwise8(signed=number == 0) if self.moments == "8bit" else Exact())
        object.__setattr__(self, "planes", tuple(planes))

    @property
    def master(self) -> torch.dtype:
        """Of the masters."""
        return self.planes[0].fields[0].dtype

    @property
    def gradient(self) -> Field:
        """Of the gradients."""
        return Field(torch.bfloat16 if self.gradients == "bf16" else torch.float32)

    def places(self, elements: int) -> Iterator[tuple[int, int, Field]]:
        """Each field of a state file of so many elements: its plane's number, where it begins, and itself."""
        offset = 0
        for number, plane in enumerate(self.planes):
            for one in plane.fields:
                yield number, offset, one
                offset += one.size(elements)

    def state_bytes(self, elements: int) -> int:
        """Of a state file of so many elements."""
        return sum(one.size(elements) for _, _, one in self.places(elements))

    def buffer_bytes(self, elements: int) -> int:
        """Of what a worker holds of a piece as it lies in the files: its state and its gradient, or a frozen piece."""
        return max(self.state_bytes(elements) + self.gradient.size(elements), elements * self.frozen.itemsize)

    def scratch_bytes(self, piece: int) -> int:
        """Of a worker for pieces of so many elements, beside that: planes decoded, and `Scratch`. fp32 needs none."""
        decoded = sum(one.fields[0].dtype != torch.float32 for one in self.planes)
        decoded += self.gradient.dtype != torch.float32
        return (decoded + 1) * min(CHUNK, piece) * 4 if decoded else 0
