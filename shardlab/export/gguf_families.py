"""The model families that a GGUF file can hold here: their names in it, their settings, how their tensors lie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlab.errors import UserError
from shardlab.export.gguf_file import BLOCK, GgufDtype, GgufTensor, Value
from shardlab.export.source import Source

_LLAMA_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LLAMA_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2_ENDS = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


@dataclass(frozen=True)
class Family:
    """How llama.cpp knows one kind of model."""

    architecture: str  # llama.cpp's name, the prefix of its metadata
    layers: str  # prefix of a layer's tensors, before its number
    ends: Mapping[str, str]
    layer: Mapping[str, str]
    settings: Callable[[Any], dict[str, Value]]  # without the prefix; raises UserError for what the runtime ignores
    interleaved: bool = False  # rotary pairs are neighbours, not half a head apart
    transposed: tuple[str, ...] = ()  # layers whose weight is (inputs, outputs)

    def name(self, ours: str) -> str:
        """The name in the file of the tensor that transformers calls `ours`."""
        stem, _, kind = ours.rpartition(".")
        if stem in self.ends:
            return f"{self.ends[stem]}.{kind}"
        number, _, part = stem.removeprefix(self.layers).partition(".")
        if not stem.startswith(self.layers) or part not in self.layer:
            raise UserError(f"llama.cpp's {self.architecture} has no place for the tensor {ours}")
        return f"blk.{number}.{self.layer[part]}.{kind}"


def family(source: Source) -> Family:
    """The family of `source`. Raises UserError for one that is not known here, naming it."""
    kind = source.config.model_type
    if kind not in _FAMILIES:
        raise UserError(f"{source.directory}: gguf export knows {', '.join(_FAMILIES)}, not model_type {kind}")
    return _FAMILIES[kind]


def tensors(source: Source, dtype: GgufDtype) -> list[GgufTensor]:
    """What the file holds. Vectors and learned positions stay f32, as llama.cpp wants them."""
    known = family(source)
    planned = []
    for name, shape in source.shapes.items():
        file_shape = tuple(shape[::-1]) if _is_transposed(known, name) else tuple(shape)
        planned.append(GgufTensor(known.name(name), file_shape, _dtype(name, file_shape, dtype), _loader(source, name)))
    if (factors := rope_factors(source.config)) is not None:
        planned.append(GgufTensor("rope_freqs.weight", tuple(factors.shape), "f32", lambda: factors))
    return planned


def left_wider(planned: list[GgufTensor], dtype: GgufDtype) -> list[GgufTensor]:
    """The matrices that could not have `dtype`, for their rows are no multiple of a block."""
    return [one for one in planned if len(one.shape) > 1 and one.dtype == "f16" and dtype != "f16"]


def to_file(known: Family, config: Any, name: str, value: Tensor) -> Tensor:
    """`value` of the tensor `name` as it lies in the file."""
    if _is_transposed(known, name):
        return value.T
    heads = _rotary_heads(known, config, name)
    if heads is None:
        return value
    # (heads, 2 halves, pairs): the file has the two of a pair next to each other.
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def from_file(known: Family, config: Any, name: str, value: Tensor) -> Tensor:
    """The inverse of `to_file`."""
    if _is_transposed(known, name):
        return value.T
    heads = _rotary_heads(known, config, name)
    if heads is None:
        return value
    return value.view(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def rope_factors(config: Any) -> Tensor | None:
    """What each rotary frequency of a Llama 3 is divided by, fp32 (head_dim / 2); None for other kinds of scaling."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    factors: Tensor = parameters["rope_theta"] ** -exponents / scaled
    return factors


def _is_transposed(known: Family, name: str) -> bool:
    return name.endswith(tuple(f"{layer}.weight" for layer in known.transposed))


def _rotary_heads(known: Family, config: Any, name: str) -> int | None:
    if not known.interleaved:
        return None
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else None


def _dtype(name: str, shape: tuple[int, ...], wanted: GgufDtype) -> GgufDtype:
    if len(shape) == 1 or name == "transformer.wpe.weight":
        return "f32"
    return "f16" if wanted.startswith("q") and shape[-1] % BLOCK else wanted


def _loader(source: Source, name: str) -> Callable[[], Tensor]:
    known = family(source)
    return lambda: to_file(known, source.config, name, source.weights.tensor(name)).contiguous()


def _llama_settings(config: Any) -> dict[str, Value]:
    _want(config, "hidden_act", "silu")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "context_length": _context(config),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        **_rope(config),
    }


def _gpt2_settings(config: Any) -> dict[str, Value]:
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        raise UserError(f"llama.cpp's gpt2 has gelu_new, not activation_function {config.activation_function}")
    _want(config, "scale_attn_weights", True)
    _want(config, "scale_attn_by_inverse_layer_idx", False)
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
    }


def _context(config: Any) -> int:
    """Positions up to which the runtime computes what the model does: it knows no sliding window for these families."""
    window = getattr(config, "sliding_window", None)
    return int(config.max_position_embeddings if window is None else min(window, config.max_position_embeddings))


def _rope(config: Any) -> dict[str, Value]:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("llama.cpp turns whole heads for this family: partial_rotary_factor has to be 1")
    if kind not in ("default", "linear", "llama3") or (kind == "llama3" and config.model_type not in _LLAMA3_ROPE):
        raise UserError(f"gguf export of a {config.model_type} can't keep rope_type {kind}")
    settings: dict[str, Value] = {"rope.freq_base": float(parameters.get("rope_theta", 10000.0))}
    if kind == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(parameters["factor"])}
    return settings


def _want(config: Any, key: str, value: object) -> None:
    if getattr(config, key) != value:
        raise UserError(f"llama.cpp's {config.model_type} has {key} {value}, not {getattr(config, key)}")


_LLAMA3_ROPE = ("llama", "mistral")  # whose architecture in llama.cpp reads rope_freqs
_FAMILIES = {
    "llama": Family("llama", "model.layers.", _LLAMA_ENDS, _LLAMA_LAYER, _llama_settings, interleaved=True),
    "mistral": Family("llama", "model.layers.", _LLAMA_ENDS, _LLAMA_LAYER, _llama_settings, interleaved=True),
    "qwen2": Family("qwen2", "model.layers.", _LLAMA_ENDS, _LLAMA_LAYER, _llama_settings),
    "qwen3": Family("qwen3", "model.layers.", _LLAMA_ENDS, _LLAMA_LAYER, _llama_settings),
    "gpt2": Family(
        "gpt2",
        "transformer.h.",
        _GPT2_ENDS,
        _GPT2_LAYER,
        _gpt2_settings,
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
}
