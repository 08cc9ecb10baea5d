"""What an operator has to do: floating-point operations where it multiplies matrices, else the bytes that it moves.

Matrix products are counted by torch's own registry (`torch.utils.flop_counter`), which lacks the in-place forms and the
CPU's attention.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardlab.plan import Work

_ATEN = torch.ops.aten
_ATTENTION = "_scaled_dot_product"
_IN_PLACE = {_ATEN.addmm_: _ATEN.addmm, _ATEN.baddbmm_: _ATEN.baddbmm}
_BATCHED = {_ATEN.bmm, _ATEN.baddbmm, _ATEN.baddbmm_}
# Read a few rows of their first operand, and write as much.
_PICKING = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather}
_FREE = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.detach}
# Of attention's backward pass: five products (scores again, and a gradient each) where the forward pass has two.
_BACKWARD = 2.5
NOTHING = Work()


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Work:
    """The work of one call."""
    packet = func._overloadpacket
    name = func._schema.name.split("::")[1]
    if name.startswith(_ATTENTION):
        return Work(attention=_attention(name, args, kwargs), operations=1)
    if packet in flop_registry or packet in _IN_PLACE:
        count = float(flop_registry[_IN_PLACE.get(packet, packet)](*args, **kwargs, out_val=result))
        if packet in _BATCHED:  # attention written out: many small products
            return Work(attention=count, operations=1)
        return Work(products=count, operations=1)
    made = list(tensors((result,)))
    if packet in _FREE or not made:
        return NOTHING
    if packet in _PICKING:
        return Work(moved=2 * sum(map(_extent, made)), operations=1)
    given = list(tensors((*args, *kwargs.values())))
    if not func._schema.is_mutable:
        sources = {tensor.untyped_storage()._cdata for tensor in given}
        if all(tensor.untyped_storage()._cdata in sources for tensor in made):
            return NOTHING  # a view
    if name in ("scatter_add_", "index_add_", "scatter_"):
        return Work(moved=3 * _extent(given[-1]), operations=1)
    return Work(moved=sum(map(_extent, given)) + sum(map(_extent, made)), operations=1)


def _attention(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    backward = "backward" in name
    first = 1 if backward else 0
    query, key, value = args[first : first + 3]
    batch, heads, rows, width = query.shape
    # Causal attention without a mask skips what is above the diagonal; a mask's zeros are computed.
    flags = [item for item in (*args, *kwargs.values()) if isinstance(item, bool)]
    causal = bool(flags and flags[0])
    products = 2.0 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])
    return products * (_BACKWARD if backward else 1.0) * (0.5 if causal else 1.0)


def _extent(tensor: Tensor) -> int:
    """Bytes behind a tensor, once where it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors(values: Any) -> Iterator[Tensor]:
    """Those in `values` and in lists within."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors(value)
