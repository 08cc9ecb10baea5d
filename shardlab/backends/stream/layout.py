"""How a model's tensors lie in segments: the unit that is read, computed with and written.

Every block is a segment. Embedding and head are cut into segments of rows, so that no segment is larger than a block
(or `LEAST_ROWS_ELEMENTS`), whatever the vocabulary. What else stands before the blocks (positions, a norm) and after
them (the final norm, a bias) is one small segment each.

A segment has two planes of elements: what is trained, of which there is one plane for each state (masters, moments,
gradient), and what is frozen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from shardlab.plan import ModelShape, ParameterShape

PAD = 2048  # elements that planes and pieces are multiples of: whole sectors, in two bytes an element too
ALIGN = 256  # elements that a tensor's place in its plane is a multiple of: a block of 8-bit moments
LEAST_ROWS_ELEMENTS = 4 * 1024**2  # smaller cuts of a vocabulary cost more visits than they save

Role = Literal["table", "root", "block", "tail", "head"]


@dataclass(frozen=True)
class Part:
    """A tensor, or a flat range of one: the elements from `start` on, at `offset` in the plane."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    numel: int
    offset: int
    trained: bool


@dataclass(frozen=True)
class Segment:
    """`index` is its place in the layout. `trained` and `frozen`: elements of its planes, padding included."""

    index: int
    role: Role
    parts: tuple[Part, ...]
    trained: int
    frozen: int

    @property
    def elements(self) -> int:
        """Of both planes: what computes needs so many."""
        return self.trained + self.frozen

    def place(self, part: Part) -> slice:
        """Where `part` lies in the segment's weights, which are the trained plane and then the frozen one."""
        begin = part.offset + (0 if part.trained else self.trained)
        return slice(begin, begin + part.numel)

    def rows(self) -> slice:
        """Of a segment of a table or a head: the rows of the whole tensor."""
        (part,) = self.parts
        width = part.shape[1]
        return slice(part.start // width, (part.start + part.numel) // width)


@dataclass(frozen=True)
class Layout:
    """All segments, and the indices of each role's. `head` is `table` where they are tied."""

    segments: tuple[Segment, ...]
    table: tuple[int, ...]
    root: int
    blocks: tuple[int, ...]
    tail: int
    head: tuple[int, ...]

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head == self.table

    @property
    def largest(self) -> int:
        """Elements of the largest segment."""
        return max(segment.elements for segment in self.segments)

    @property
    def largest_trained(self) -> int:
        """Trained elements of the segment with the most."""
        return max(segment.trained for segment in self.segments)


def lay_out(shape: ModelShape, *, rows_elements: int | None = None) -> Layout:
    """The segments of a language model; `rows_elements`: another largest size of the vocabulary's."""
    blocks = [[p for p in shape.parameters if p.unit == number] for number in range(1, shape.blocks + 1)]
    limit = rows_elements or max([LEAST_ROWS_ELEMENTS, *(sum(p.numel for p in block) for block in blocks)])
    vocabulary = {shape.table, shape.head}
    named = {p.name: p for p in shape.parameters}
    after = [named[name] for name in shape.after]
    elsewhere = {*shape.after, *vocabulary, *(p.name for block in blocks for p in block)}
    outside = [p for p in shape.parameters if p.name not in elsewhere]
    made: list[Segment] = []

    def add(role: Role, parts: tuple[Part, ...]) -> int:
        made.append(Segment(len(made), role, parts, _plane(parts, trained=True), _plane(parts, trained=False)))
        return len(made) - 1

    def add_rows(role: Role, name: str | None) -> tuple[int, ...]:
        return tuple(add(role, (part,)) for part in _rows(named[name], limit)) if name is not None else ()

    table = add_rows("table", shape.table)
    root = add("root", _packed(outside))
    numbers = tuple(add("block", _packed(block)) for block in blocks)
    tail = add("tail", _packed(after))
    head = table if shape.head == shape.table else add_rows("head", shape.head)
    return Layout(tuple(made), table, root, numbers, tail, head)


def _packed(parameters: list[ParameterShape]) -> tuple[Part, ...]:
    offsets = {True: 0, False: 0}
    parts = []
    for p in parameters:
        parts.append(Part(p.name, p.shape, 0, p.numel, offsets[p.trainable], p.trainable))
        offsets[p.trainable] += -(-p.numel // ALIGN) * ALIGN
    return tuple(parts)


def _rows(parameter: ParameterShape, limit: int) -> Iterator[Part]:
    """Ranges of whole rows of at most `limit` elements, as even as can be."""
    rows, width = parameter.shape
    count = -(-parameter.numel // limit)
    step = -(-rows // count)
    for first in range(0, rows, step):
        numel = (min(first + step, rows) - first) * width
        yield Part(parameter.name, parameter.shape, first * width, numel, 0, parameter.trainable)


def _plane(parts: tuple[Part, ...], *, trained: bool) -> int:
    end = max((part.offset + part.numel for part in parts if part.trained == trained), default=0)
    return -(-end // PAD) * PAD


def pieces(elements: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of a plane of `elements`, `size` at a time."""
    for start in range(0, elements, size):
        yield start, min(start + size, elements)


def overlaps(segment: Segment, start: int, stop: int, *, trained: bool) -> Iterator[tuple[Part, slice, int]]:
    """What of the segment's tensors lies in [start, stop) of a plane.

    Each as (its part, where it lies in the piece, the first of its elements in the flattened tensor).
    """
    for part in segment.parts:
        first, last = max(start, part.offset), min(stop, part.offset + part.numel)
        if part.trained == trained and first < last:
            yield part, slice(first - start, last - start), part.start + first - part.offset


def runs(segment: Segment, key: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    """The trained plane as (start, stop, `key` of the tensors in it), neighbours of one key taken together.

    Padding goes with the tensor before it: its values and gradients are zero, and stay so.
    """
    trained = [part for part in segment.parts if part.trained]
    begins = [part.offset for part in trained]
    ends = [*begins[1:], segment.trained]
    labelled = [(key[part.name], begin, end) for part, begin, end in zip(trained, begins, ends, strict=False)]
    for label, members in groupby(labelled, key=lambda item: item[0]):
        members_ = list(members)
        yield members_[0][1], members_[-1][2], label
