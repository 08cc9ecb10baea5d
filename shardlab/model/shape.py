"""A module's parameters as data: what planning and placing need of it."""

from torch import nn

from shardlab.model.teacher import Teacher
from shardlab.model.trainable import Trainable
from shardlab.plan import ROOT, ModelShape, ParameterShape


def model_shape(module: Trainable) -> ModelShape:
    """The parameters of `module`, before anything is sharded, and the units they belong to."""
    count = len(module.blocks)
    units: list[tuple[int, nn.Module]] = list(enumerate(module.blocks, start=1))
    if module.last is not None and not module.tied:
        units.append((count + 1, module.last))
    if module.embedding is not None:
        units.append((count + 2, module.embedding))
    unit_of = {id(parameter): index for index, unit in units for parameter in unit.parameters()}
    shapes = tuple(
        ParameterShape(name, tuple(parameter.shape), parameter.requires_grad, unit_of.get(id(parameter), ROOT))
        for name, parameter in module.named_canonical()
    )
    names = {id(parameter): name for name, parameter in module.named_canonical()}
    if module.tail is None:
        return ModelShape(shapes, count, has_tail=module.last is not None)
    table, head = getattr(module.table, "weight", None), module.tail.head.weight
    after = tuple(names[id(parameter)] for parameter in module.tail.parameters() if parameter is not head)
    return ModelShape(shapes, count, True, names.get(id(table)), names[id(head)], after)


def teacher_shape(teacher: Teacher) -> ModelShape:
    """The same of a teacher: head and embedding are units of their own, unless they are tied."""
    unit_of = {
        id(parameter): number
        for number, unit in enumerate(teacher.units[:-1], start=1)
        for parameter in unit.parameters()
    }
    shapes = tuple(
        ParameterShape(name, tuple(parameter.shape), False, unit_of.get(id(parameter), ROOT))
        for name, parameter in teacher.named_canonical()
    )
    return ModelShape(shapes, len(teacher.blocks), has_tail=True)
