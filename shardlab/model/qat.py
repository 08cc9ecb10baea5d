"""Training with rounded weights: a linear layer computes with what `shardlab quantize` would make of its weight.

The gradient is that of the rounded weight, given to the weight itself as if rounding were the identity ("straight
through", arXiv 1308.3432). The weight stays the parameter: it is sharded, updated and saved as in any other run.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardlab.errors import UserError
from shardlab.model.grid import Grid, find_scales, rounded
from shardlab.model.schemes import Choice, Layer, choose, parse_rules, parse_scheme
from shardlab.model.segments import dissect
from shardlab.recipe import QATSection

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LINEAR = torch.ops.aten.linear.default  # not torch.nn.functional's, which ZeRO-3 replaces by one that wants parameters


class _Straight(torch.autograd.Function):
    """Saves the weight itself, as a plain layer does: where it is sharded, no rounded copy outlives the layer."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, dtype: torch.dtype) -> Tensor:
        scale = find_scales(weight.float(), grid, dtype)
        ctx.save_for_backward(given, weight, scale)
        ctx.grid = grid
        result: Tensor = _LINEAR(given, _read(weight, scale, grid), bias)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, weight, scale = ctx.saved_tensors
        (gradient,), wanted = gradients, ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            gradient @ _read(weight, scale, ctx.grid) if wanted[0] else None,
            rows.t() @ given.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
            None,
            None,
        )


def _read(weight: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """What a reader of the quantized file computes with."""
    grouped = weight.float().reshape(*scale.shape, -1)
    return rounded(grouped, scale[..., None], grid).reshape(weight.shape).to(weight.dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that is trained for `grid`, with scales of `scale_dtype`."""

    grid: Grid
    scale_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        result: Tensor = _Straight.apply(input, self.weight, self.bias, self.grid, self.scale_dtype)
        return result


def round_layers(model: nn.Module, section: QATSection) -> dict[str, Choice]:
    """Let the linear layers of `model` (a language model's blocks; any other module whole) compute rounded, in place.

    What becomes of each layer, by name. Raises UserError, by name, for what `shardlab quantize` would refuse, and for
    what only rounds weights here.
    """
    inside = ""
    if hasattr(model, "get_output_embeddings") and hasattr(model, "config"):
        inside = f"{dissect(model).blocks}."
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.startswith(inside)}
    if not layers:
        raise UserError("train.qat: the blocks have no linear layer to round")
    choices = choose(
        [Layer(name, layer.out_features, layer.in_features) for name, layer in layers.items()],
        parse_scheme(section.scheme, section.group_size),
        parse_rules(section.local, section.group_size),
        section.on_indivisible,
    )
    for name, choice in choices.items():
        layer = layers[name]
        if choice.scheme is None:
            continue
        if choice.scheme.int8_inputs:
            raise UserError(f"train.qat: {choice.scheme.name} ({name}) rounds inputs too; here only weights are")
        if type(layer) is not nn.Linear:
            raise UserError(f"train.qat: {name} is a {type(layer).__name__}, whose own way of computing would be lost")
        layer.__class__ = RoundedLinear
        assert isinstance(layer, RoundedLinear)
        layer.grid, layer.scale_dtype = choice.scheme.grid, _DTYPES[section.dtype]
    return choices


def command(section: QATSection) -> str:
    """What `shardlab quantize` has to be told to make the weights that the training saw."""
    parts = ["--method rtn", f"--scheme {section.scheme}"]
    if section.group_size is not None:
        parts.append(f"--group-size {section.group_size}")
    parts += [f"--local '{rule}'" for rule in section.local]
    if section.on_indivisible != "error":
        parts.append(f"--on-indivisible {section.on_indivisible}")
    if section.dtype != "bf16":
        parts.append(f"--dtype {section.dtype}")
    return " ".join(parts)
