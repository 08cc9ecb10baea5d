"""A causal language model as an ONNX graph: any batch, any length; what its attention remembers goes in and comes out.

Inputs and outputs are named as Optimum's exports have them, which other programs look for: `input_ids`,
`attention_mask`, `position_ids` and `past_key_values.N.key|value` in; `logits` and `present.N.key|value` out.
"""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.errors import UserError

TRACED = (2, 3, 5)  # batch, tokens, remembered tokens of the run that the graph is traced from
_KINDS = ("key", "value")


@dataclass(frozen=True)
class Memory:
    """What a layer remembers of a token: its kind of attention is the same in all."""

    layers: int
    heads: int
    head_dim: int


def memory_of(model: Any) -> Memory:
    """Found by one token. Raises UserError for a model that remembers anything but keys and values of one shape."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        model(**cache_argument(model, cache), input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True)
    shapes = {
        tuple(tensor.shape)
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor)
    }
    if len(shapes) != 1 or len(next(iter(shapes))) != 4 or len(cache.layers) != model.config.num_hidden_layers:
        raise UserError(f"onnx export knows models that remember keys and values, not {model.config.model_type}")
    _, heads, _, head_dim = next(iter(shapes))
    return Memory(len(cache.layers), heads, head_dim)


def traced(model: Any, memory: Memory) -> Any:
    """The graph, an `onnx_ir.Model` with the weights in fp32. Raises UserError where torch can't export the model."""
    batch, tokens, past = TRACED
    states = [
        tuple(torch.zeros(batch, memory.heads, past, memory.head_dim) for _ in _KINDS) for _ in range(memory.layers)
    ]
    positions = torch.arange(past, past + tokens).expand(batch, tokens).contiguous()
    arguments = (
        torch.zeros(batch, tokens, dtype=torch.long),
        torch.ones(batch, past + tokens, dtype=torch.long),
        positions,
        states,
    )
    any_size = torch.export.Dim.DYNAMIC
    free = {0: any_size, 1: any_size}
    shapes = (free, free, free, [({0: any_size, 2: any_size},) * 2 for _ in states])
    with _quiet():
        try:
            program = torch.export.export(_Flat(model), arguments, dynamic_shapes=shapes, strict=False)
            exported = torch.onnx.export(
                program,
                args=arguments,
                dynamo=True,
                input_names=input_names(memory),
                output_names=output_names(memory),
            )
        except Exception as error:  # the exporter raises many kinds, for what it can't follow in a model's code
            first = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            raise UserError(f"torch can't export this {model.config.model_type} to onnx: {first}") from error
    assert exported is not None
    _name_sizes(exported.model, memory)
    return exported.model


def input_names(memory: Memory) -> list[str]:
    """In the graph's order."""
    return ["input_ids", "attention_mask", "position_ids", *_states("past_key_values", memory)]


def output_names(memory: Memory) -> list[str]:
    """In the graph's order."""
    return ["logits", *_states("present", memory)]


def _states(prefix: str, memory: Memory) -> list[str]:
    return [f"{prefix}.{layer}.{kind}" for layer in range(memory.layers) for kind in _KINDS]


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """By the name that this version of transformers prefers."""
    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


class _Flat(nn.Module):
    """The model with tensors in and out."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        states: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        # Without a config every layer remembers all: a sliding window is then the mask's alone.
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(states):
            cache.update(keys, values, layer)
        logits = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **cache_argument(self.model, cache),
        ).logits
        return (logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))


def _name_sizes(model: Any, memory: Memory) -> None:
    """Call the free sizes by name, and drop what the exporter wrote beside the graph: source paths, other sizes."""
    import onnx_ir

    state = ["batch", memory.heads, "past", memory.head_dim]
    sizes = {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total"],
        "position_ids": ["batch", "sequence"],
        "logits": ["batch", "sequence", model.graph.outputs[0].shape[-1]],
    }
    ends = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        total = [*state[:2], "total", state[3]]
        value.shape = onnx_ir.Shape(sizes.get(value.name, total if value.name.startswith("present") else state))
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in ends:
                value.shape = None
    for value in model.graph.initializers.values():
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks on stdout and warns of libraries that nobody needs here."""
    loud = logging.getLogger("torch.onnx")
    level = loud.level
    loud.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        loud.setLevel(level)
