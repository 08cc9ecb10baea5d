"""The state that lies in the module on every backend alike: its names and shapes, and its buffers."""

import math
from collections.abc import Iterator

from shardlab.errors import UserError
from shardlab.model.trainable import Trainable
from shardlab.state.box import whole
from shardlab.state.fragment import BUFFER, Fragment, StateReader
from shardlab.state.held import Held, fragments_of, read_held
from shardlab.topology import Topology


def check_tensors(module: Trainable, reader: StateReader) -> None:
    """Raises UserError that names a tensor which only the model or only the checkpoint has, or of another shape."""
    shapes = {name: tuple(shape) for name, shape in module.shapes.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in module.named_kept_buffers()}
    mine = {name: shape for name, shape in shapes.items() if math.prod(shape)}  # nothing else is ever a fragment
    theirs = reader.shapes()
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
