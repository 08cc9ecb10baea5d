"""What a worker holds of a piece: its fields as they lie in the files, and a few thousand elements of it as numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardlab.backends.stream.direct import aligned
from shardlab.backends.stream.encoding import CHUNK, Field, Format, Scratch
from shardlab.backends.stream.layout import pieces


class Buffer:
    """For pieces of up to `piece` elements. Views of it are valid until the next is asked for."""

    def __init__(self, form: Format, piece: int):
        self._form = form
        self._bytes = aligned(form.buffer_bytes(piece), torch.uint8)
        # Memory that is never touched, as that of fp32 planes, is none.
        self._decoded = [aligned(min(CHUNK, piece)) for _ in range(len(form.planes) + 1)]
        self.scratch = Scratch()

    def numbers(self, elements: int, dtype: torch.dtype) -> Tensor:
        """(elements,) at the buffer's beginning."""
        return self._bytes[: elements * dtype.itemsize].view(dtype)

    def state(self, elements: int) -> "Piece":
        """All fields of so many elements, one behind the other, and behind them their gradients."""
        return Piece(self._form, self._bytes, self._decoded, self.scratch, elements)


class Piece:
    """A piece of a segment's trained plane in a buffer.

    `fields`: bytes of each field of its state, in the file's order; `gradient`: bytes of its gradients.
    """

    def __init__(self, form: Format, memory: Tensor, decoded: list[Tensor], scratch: Scratch, elements: int):
        self._form, self._decoded, self._scratch, self._elements = form, decoded, scratch, elements
        self.fields, self._numbers = [], [[] for _ in form.planes]  # type: ignore[var-annotated]
        end = 0
        for number, offset, one in form.places(elements):
            end = offset + one.size(elements)
            self.fields.append(memory[offset:end])
            self._numbers[number].append((one, _as_numbers(self.fields[-1], one, elements)))
        self.gradient = memory[end : end + form.gradient.size(elements)]
        self._gradient = _as_numbers(self.gradient, form.gradient, elements)

    def chunks(self) -> Iterator[slice]:
        """Ranges of it that are decoded at a time."""
        return (slice(start, stop) for start, stop in pieces(self._elements, CHUNK))

    def decode(self, chunk: slice) -> list[Tensor]:
        """The numbers of each plane, fp32, to be changed and given to `encode`."""
        return [self._decode(number, chunk, into) for number, into in enumerate(self._decoded[:-1])]

    def decode_plane(self, number: int, chunk: slice) -> Tensor:
        """The numbers of one plane, fp32."""
        return self._decode(number, chunk, self._decoded[number])

    def gradients(self, chunk: slice) -> Tensor:
        """fp32, to be spoilt."""
        part = self._gradient[chunk]
        return part if part.dtype == torch.float32 else self._decoded[-1][: len(part)].copy_(part)

    def encode(self, chunk: slice, planes: list[Tensor], *, nearest: bool = False) -> None:
        """Take `planes`, the numbers of each; they are spoilt. `nearest`: without chance."""
        for number, values in enumerate(planes):
            self._form.planes[number].encode(values, self._raw(number, chunk), self._scratch, nearest=nearest)

    def masters(self, chunk: slice) -> Tensor:
        """As they are stored, in their own type."""
        return self._raw(0, chunk)[0]

    def _decode(self, number: int, chunk: slice, into: Tensor) -> Tensor:
        return self._form.planes[number].decode(
            self._raw(number, chunk), into[: chunk.stop - chunk.start], self._scratch
        )

    def _raw(self, number: int, chunk: slice) -> list[Tensor]:
        return [data[one.count(chunk.start) : one.count(chunk.stop)] for one, data in self._numbers[number]]


def _as_numbers(data: Tensor, one: Field, elements: int) -> Tensor:
    return data.view(one.dtype)[: one.count(elements)]
