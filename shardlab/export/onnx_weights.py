"""Fewer bits for the matrices of an ONNX graph, in operators that onnxruntime has kernels for."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from shardlab.errors import UserError
from shardlab.export.source import require
from shardlab.model.grid import Grid, find_scales, for_columns

GROUPS = (16, 32, 64, 128, 256)  # sizes of a block that onnxruntime's operator takes
_DOMAIN = "com.microsoft"
_INT8_INPUTS = 4  # "accuracy level": a block's inputs are rounded to int8, as its weights are


@dataclass(frozen=True)
class OnnxDtype:
    """`grid` None: fp32. A grid without groups is standard ONNX, inputs rounded to 8 bits by one scale for all."""

    name: str
    grid: Grid | None


def parse_onnx_dtype(text: str) -> OnnxDtype:
    """`fp32`, `int8`, `int8g32`, `int4` (in groups of 32), `int4g64`. Raises UserError for another name."""
    if text == "fp32":
        return OnnxDtype(text, None)
    found = re.fullmatch(r"int([48])(?:g(\d+))?", text)
    if found is None or (found[2] is not None and int(found[2]) not in GROUPS):
        groups = ", ".join(map(str, GROUPS))
        raise UserError(f"--dtype {text}: choose fp32, int8, int4, or int8gN or int4gN with N of {groups}")
    bits, group = int(found[1]), None if found[2] is None else int(found[2])
    if bits == 4 and group is None:
        group = 32
    return OnnxDtype(f"int{bits}" + ("" if group is None else f"g{group}"), Grid(bits, group))


@dataclass
class Rounded:
    """What became of a model's matrices, (outputs, inputs) or (tokens, hidden) by what they were."""

    values: dict[str, Tensor] = field(default_factory=dict)  # fingerprint of a layer's matrix -> what it is now
    tables: dict[str, Tensor] = field(default_factory=dict)  # of an embedding's
    left: list[str] = field(default_factory=list)  # layers that stay fp32, for a group doesn't divide their inputs

    def give(self, model: nn.Module) -> None:
        """Give `model`, the one that the graph was traced from, the file's values. Tied layers are tied no more."""
        with torch.no_grad():
            for module in model.modules():
                known = self.tables if isinstance(module, nn.Embedding) else self.values
                matrix = _matrix_of(module)
                if matrix is not None and (value := known.get(fingerprint(matrix))) is not None:
                    turned = value if _is_rows(module) else value.T.contiguous()
                    module.weight = nn.Parameter(turned, requires_grad=False)


def fingerprint(matrix: Tensor) -> str:
    """Of its values and shape."""
    values = np.ascontiguousarray(matrix.detach().float().numpy())
    return f"{values.shape}{xxhash.xxh3_128_hexdigest(values.data)}"


def shrink(graph: Any, grid: Grid, model: nn.Module) -> Rounded:
    """Round the matrices of `graph` (of an onnx_ir.Model) that are layers of `model`, in place.

    The embedding gets 8 bits whatever the grid, with one scale for a row.
    """
    ir = require("onnx_ir")
    names = {fingerprint(m): name for name, module in model.named_modules() if (m := _matrix_of(module)) is not None}
    account = Rounded()
    inputs: dict[Any, Any] = {}
    for node in list(graph):
        if node.op_type == "Gather" and _is_matrix(node.inputs[0]):
            if (key := fingerprint(_tensor(node.inputs[0]))) in names:
                account.tables[key] = _round_table(ir, graph, node)
            continue
        weight = _layer_matrix(node)
        if weight is None or (key := fingerprint(weight)) not in names:
            continue
        if grid.group_size is not None and weight.shape[1] % grid.group_size:
            account.left.append(names[key])
            continue
        scale = find_scales(weight, grid, torch.float32)
        wide = for_columns(scale, weight.shape[1])
        integers = (weight / wide).round_().clamp_(grid.lowest, grid.highest)
        account.values[key] = integers * wide
        _round_product(ir, graph, node, integers, scale, grid, inputs)
    graph.opset_imports[_DOMAIN] = 1
    _drop_unused(graph)
    return account


def _matrix_of(module: nn.Module) -> Tensor | None:
    """(outputs, inputs) of a layer, (tokens, hidden) of an embedding; None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    return weight if _is_rows(module) else weight.T


def _is_rows(module: nn.Module) -> bool:
    """GPT-2's own layers have (inputs, outputs)."""
    return isinstance(module, nn.Linear | nn.Embedding)


def _layer_matrix(node: Any) -> Tensor | None:
    """(outputs, inputs) of what a node multiplies by; None where it does something else."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    value, turned = node.inputs[1], node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    maker = value.producer()
    if maker is not None and maker.op_type == "Transpose":  # a tied head's, which is the embedding's too
        value, turned = maker.inputs[0], not turned
    if not _is_matrix(value):
        return None
    return _tensor(value) if turned else _tensor(value).T.contiguous()


def _is_matrix(value: Any) -> bool:
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 2


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.array(value.const_value.numpy(), dtype=np.float32))


def _constant(ir: Any, graph: Any, name: str, array: Any) -> Any:
    value = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
    value.shape, value.dtype = value.const_value.shape, value.const_value.dtype
    graph.register_initializer(value)
    return value


def _round_table(ir: Any, graph: Any, node: Any) -> Tensor:
    """Look up int8 rows and their scales; returns the table as it is now."""
    table, place = node.inputs[0], node.inputs[1]
    values = _tensor(table)
    scale = find_scales(values, Grid(8), torch.float32)
    integers = (values / scale).round_().clamp_(-128, 127)
    rows = ir.node("Gather", [_constant(ir, graph, f"{table.name}.int8", integers.to(torch.int8).numpy()), place])
    wide = ir.node("Cast", rows.outputs, attributes={"to": ir.DataType.FLOAT})
    scales = ir.node("Gather", [_constant(ir, graph, f"{table.name}.scale", scale.numpy()), place])
    _replace(graph, node, [rows, wide, scales, ir.node("Mul", [wide.outputs[0], scales.outputs[0]])], ir)
    return integers * scale


def _round_product(
    ir: Any, graph: Any, node: Any, integers: Tensor, scale: Tensor, grid: Grid, inputs: dict[Any, Any]
) -> None:
    """`inputs`: of values that were rounded to 8 bits, by the value: query, key and value are given the same."""
    given, name = node.inputs[0], node.inputs[1].name
    nodes: list[Any] = []
    if grid.group_size is None:
        if given not in inputs:
            inputs[given] = ir.node("DynamicQuantizeLinear", [given], num_outputs=3)
            nodes.append(inputs[given])
        small, unit, zero = inputs[given].outputs
        matrix = _constant(ir, graph, f"{name}.int8", integers.T.to(torch.int8).numpy())
        product = ir.node("MatMulInteger", [small, matrix, zero])
        wide = ir.node("Cast", product.outputs, attributes={"to": ir.DataType.FLOAT})
        units = ir.node("Mul", [unit, _constant(ir, graph, f"{name}.scale", scale[:, 0].numpy())])
        nodes += [product, wide, units, ir.node("Mul", [wide.outputs[0], units.outputs[0]])]
    else:
        outputs, width = integers.shape
        packed = _packed(integers, grid).reshape(outputs, width // grid.group_size, -1)
        attributes = {"K": width, "N": outputs, "bits": grid.bits, "block_size": grid.group_size}
        nodes.append(
            ir.node(
                "MatMulNBits",
                [
                    given,
                    _constant(ir, graph, f"{name}.int{grid.bits}", packed),
                    _constant(ir, graph, f"{name}.scale", scale.reshape(-1).numpy()),
                ],
                attributes=attributes | {"accuracy_level": _INT8_INPUTS},
                domain=_DOMAIN,
            )
        )
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], node.inputs[2]]))
    _replace(graph, node, nodes, ir)


def _packed(integers: Tensor, grid: Grid) -> Any:
    """As the operator reads them: counted from the lowest, the first of two in the lower half of a byte."""
    counted = (integers - grid.lowest).to(torch.uint8)
    return (counted if grid.bits == 8 else counted[:, 0::2] | (counted[:, 1::2] << 4)).numpy()


def _replace(graph: Any, node: Any, nodes: list[Any], ir: Any) -> None:
    graph.insert_before(node, nodes)
    ir.convenience.replace_all_uses_with(node.outputs[0], nodes[-1].outputs[0], replace_graph_outputs=True)
    name = node.outputs[0].name
    graph.remove(node, safe=True)
    nodes[-1].outputs[0].name = name


def _drop_unused(graph: Any) -> None:
    for node in [node for node in graph if node.op_type == "Transpose" and not node.outputs[0].uses()]:
        graph.remove(node, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
