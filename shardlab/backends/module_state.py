"""The state that lies in the module on every backend alike: its names and shapes, and its buffers."""

import math
from collections.abc import Iterator

import torch

from shardlab.errors import UserError
from shardlab.model.trainable import Trainable
from shardlab.state.box import boxes_of_range, whole
from shardlab.state.fragment import BUFFER, Fragment, StateReader
from shardlab.state.held import ANY_VALUE, Held, fragments_of, read_held
from shardlab.topology import Topology

_COMPARED = 1 << 20  # elements held at a time


def check_tensors(module: Trainable, reader: StateReader) -> None:
    """Raises UserError that names a tensor which only the model or only the checkpoint has, or of another shape."""
    shapes = {name: tuple(shape) for name, shape in module.shapes.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in module.named_kept_buffers()}
    mine = {name: shape for name, shape in shapes.items() if math.prod(shape)}  # nothing else is ever a fragment
    theirs = reader.shapes()
    tied = {
        name
        for name in theirs.keys() & module.aliases.keys() - mine.keys()
        if _is_copy(reader, name, module.aliases[name])
    }
    theirs = {name: shape for name, shape in theirs.items() if name not in tied}
    for what, names in (
        ("the checkpoint lacks", mine.keys() - theirs.keys()),
        ("the checkpoint has what the model lacks:", theirs.keys() - mine.keys()),
    ):
        if names:
            raise UserError(f"{what} {len(names)} tensors, among them {min(names)}: it is of another model")
    for name, shape in mine.items():
        if theirs[name] != shape:
            raise UserError(
                f"the tensor {name} is {list(theirs[name])} in the checkpoint and {list(shape)} in the model: "
                "it is of another model"
            )


def _is_copy(reader: StateReader, alias: str, canonical: str) -> bool:
    """Whether a tensor that this model ties is there once more, equal bit for bit: DCP and others know no ties."""
    shape = reader.shapes()[alias]
    value = next((kind for kind in ANY_VALUE if kind in reader.kinds(canonical)), None)
    if value is None or reader.shapes()[canonical] != shape or len(reader.kinds(alias)) != 1:
        return False
    (kind,) = reader.kinds(alias)
    size = math.prod(shape)
    for start in range(0, size, _COMPARED):
        for box in boxes_of_range(shape, start, min(start + _COMPARED, size)):
            one, other = torch.empty(box.lengths), torch.empty(box.lengths)
            reader.read_into(alias, kind, box, one)
            reader.read_into(canonical, value, box, other)
            if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                return False
    return True


def buffer_fragments(module: Trainable, topology: Topology) -> Iterator[Fragment]:
    """The main rank writes them whole: what a module counts in its forward pass may differ between ranks."""
    if topology.is_main:
        yield from fragments_of(list(_buffers(module)))


def load_buffers(module: Trainable, reader: StateReader) -> None:
    """In place, on every rank."""
    read_held(_buffers(module), reader)


def _buffers(module: Trainable) -> Iterator[Held]:
    for name, buffer in module.named_kept_buffers():
        shape = tuple(buffer.shape)
        box = whole(shape)
        if box is not None:
            yield Held(name, shape, box, {BUFFER: buffer.detach()})
