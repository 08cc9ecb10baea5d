"""Quantized layers as `compressed-tensors` stores them, packed to their width, and config.json's word of it.

https://github.com/vllm-project/compressed-tensors: its own code packs and unpacks, so the file is by construction what
vLLM and transformers read, and the weights that a stage goes on with are those that will be read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardlab.errors import UserError
from shardlab.model.grid import Grid
from shardlab.model.schemes import Choice, Scheme


def require() -> None:
    """Raises UserError where the library is not installed."""
    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise UserError(
            "quantized models are written by compressed-tensors: pip install 'shardlab[compress]'"
        ) from error


def pack(weight: Tensor, scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """({suffix of the layer's name: tensor to store}, the weight as it will be read back in fp32).

    `weight` (outputs, inputs) may hold any values: they are rounded to the nearest of the grid; `scale` is
    (outputs, groups).
    """
    library = _scheme(scheme)
    compressor = _compressor(scheme)
    state = {"weight": weight.float(), "weight_scale": scale.to(dtype).float()}
    stored = compressor.compress(state, library)
    stored["weight_scale"] = stored["weight_scale"].to(dtype)
    # A reader in fp32: one in bf16 rounds each product of integer and scale once more.
    read = compressor.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, library)["weight"]
    return {name: tensor.contiguous().cpu() for name, tensor in stored.items()}, read


def stored_bits(scheme: Scheme, outputs: int, inputs: int, scale_bits: int = 16) -> int:
    """Of all that `pack` stores for a layer: integers that fill up words of 32 bits, scales, and the shape."""
    scales = outputs * scheme.grid.groups(inputs) * scale_bits
    if scheme.int8_inputs:
        return outputs * inputs * 8 + scales
    return outputs * -(-inputs * scheme.grid.bits // 32) * 32 + scales + 2 * 64


def rounded_inputs(given: Tensor, scheme: Scheme) -> Tensor:
    """What a layer of a scheme with int8 inputs computes with, each token's values by a scale of its own."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    arguments = _scheme(scheme).input_activations
    scale, zero_point = compute_dynamic_scales_and_zp(given, arguments, torch.nn.Module())
    rounded: Tensor = fake_quantize(given, scale, zero_point, arguments)
    return rounded


def config_section(choices: Mapping[str, Choice]) -> dict[str, Any]:
    """`quantization_config` for the layers of `choices`; those without a scheme are listed as ignored."""
    from compressed_tensors.quantization import QuantizationConfig

    groups: dict[Scheme, list[str]] = {}
    for name, choice in choices.items():
        if choice.scheme is not None:
            groups.setdefault(choice.scheme, []).append(name)
    config = QuantizationConfig(
        config_groups={
            f"group_{index}": _scheme(scheme, targets=names) for index, (scheme, names) in enumerate(groups.items())
        },
        format="mixed-precision" if len({_format(scheme) for scheme in groups}) > 1 else _format(next(iter(groups))),
        quantization_status="compressed",
        ignore=[name for name, choice in choices.items() if choice.scheme is None],
    )
    section: dict[str, Any] = config.model_dump(mode="json")
    section["quant_method"] = "compressed-tensors"
    return section


def _format(scheme: Scheme) -> str:
    return "int-quantized" if scheme.int8_inputs else "pack-quantized"


def _compressor(scheme: Scheme) -> Any:
    from compressed_tensors.compressors.base import BaseCompressor

    return BaseCompressor.get_value_from_registry(_format(scheme))


def _scheme(scheme: Scheme, targets: list[str] | None = None) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    inputs = (
        QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=True) if scheme.int8_inputs else None
    )
    return QuantizationScheme(
        targets=targets or ["Linear"], weights=_arguments(scheme.grid), input_activations=inputs, format=_format(scheme)
    )


def _arguments(grid: Grid) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=grid.bits,
        strategy="channel" if grid.group_size is None else "group",
        group_size=grid.group_size,
    )
