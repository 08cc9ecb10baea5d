"""Quantize: fewer bits for each weight, the linear layers of one block at a time."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor, nn

from shardlab.compress import packed
from shardlab.compress.card import Card, lineage_of, weight_bytes
from shardlab.compress.grid import find_scales, for_columns, rounded
from shardlab.compress.moments import Moments
from shardlab.compress.schemes import Choice, Indivisible, Layer, Scheme, choose, parse_rules, parse_scheme
from shardlab.compress.second_order import compensated, output_error
from shardlab.compress.stage import (
    DTYPES,
    SHARD_BYTES,
    Rows,
    Say,
    converted,
    output_directory,
    quality_figures,
    source_config,
    write_config,
)
from shardlab.compress.walk import Segment, Walk
from shardlab.errors import UserError
from shardlab.train.artifact import write_tensors

Method = Literal["gptq", "rtn"]


@dataclass(frozen=True)
class QuantizeConfig:
    """`local`: PATTERN=SCHEME or PATTERN=none, the last that matches a layer's name wins."""

    scheme: str = "int4"
    group_size: int | None = None
    method: Method = "gptq"
    local: tuple[str, ...] = ()
    head: bool = False
    on_indivisible: Indivisible = "error"
    dtype: str = "bf16"


def quantize(source: Path, output: Path, config: QuantizeConfig, rows: Rows, sequence_length: int, say: Say) -> Card:
    """Quantize the model in `source` into `output`, a directory that transformers and vLLM load; its card.

    Raises UserError, before anything is computed, for what can't be done: groups that don't divide, by layer; a
    model without linear layers.
    """
    packed.require()
    model_config = source_config(source)
    _check(config)
    walk = Walk(source, rows.calibration, rows.held_out, sequence_length=sequence_length)
    choices = plan_layers(walk, config)
    unties = walk.tied and choices[walk.head()[0]].scheme is not None
    if unties:
        rows_, width = walk.head()[1]
        say(f"the head was tied to the embedding; it becomes a tensor of its own: {rows_:,} x {width:,} more weights")
    stage = _Stage(choices, config, walk, say)
    with output_directory(source, output) as partial:
        write_tensors(partial, walk.run(stage.change, unties=unties), SHARD_BYTES)
        model_config["quantization_config"] = packed.config_section(choices)
        if unties:
            model_config["tie_word_embeddings"] = False
        write_config(partial, model_config, stage.dtype)
        card = Card(
            "quantize",
            {**asdict(config), "calibration_tokens": rows.tokens},
            source.name,
            {
                **quality_figures(walk.quality),
                "weight_bytes": {"before": weight_bytes(source), "after": weight_bytes(partial)},
                "relative_output_error": stage.errors,
            },
            {name: _account(choice) for name, choice in choices.items()},
            lineage_of(source),
        )
        card.write(partial)
    return card


class _Stage:
    """What is done to each segment."""

    def __init__(self, choices: dict[str, Choice], config: QuantizeConfig, walk: Walk, say: Say):
        self.dtype = DTYPES[config.dtype]
        self.errors: dict[str, float] = {}  # squared error of a layer's outputs, of their squares; where calibrated
        self._choices = choices
        self._method = config.method
        self._blocks = walk.blocks
        self._done = 0
        self._say = say

    def change(self, segment: Segment) -> Iterator[tuple[str, Tensor]]:
        """Round what is chosen, cast the rest."""
        mine = {name: layer for name, layer in segment.linears.items() if self._choices[name].scheme is not None}
        moments = Moments(mine)
        if mine and self._method == "gptq":
            with moments:
                segment.observe()
        for name, parameter in segment.parameters.items():
            layer = name.removesuffix(".weight")
            choice = self._choices.get(layer)
            if choice is None or choice.scheme is None:
                yield converted(name, parameter, self.dtype)
                continue
            moment = moments.get(layer)
            stored, read = self._rounded(parameter, choice.scheme, moment)
            if moment is not None:
                error, whole = output_error(parameter - read, moment), output_error(parameter.detach().clone(), moment)
                self.errors[layer] = error / whole if whole else 0.0
            parameter.copy_(read)
            if choice.scheme.int8_inputs:
                segment.linears[layer].register_forward_pre_hook(_rounding(choice.scheme))
            for suffix, tensor in stored.items():
                yield f"{layer}.{suffix}", tensor
        if segment.name:
            self._done += 1
            self._say(f"block {self._done}/{self._blocks}")

    def _rounded(self, weight: Tensor, scheme: Scheme, moment: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        importance = None if moment is None else moment.diagonal()
        scale = find_scales(weight, scheme.grid, self.dtype, importance)
        best = weight if moment is None else _compensated(weight, moment, scale, scheme)
        return packed.pack(best, scale, scheme, self.dtype)


def _compensated(weight: Tensor, moment: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """GPTQ, inputs of the largest moment first: their errors have the most others to be made up by."""
    order = moment.diagonal().argsort(descending=True)
    scales = for_columns(scale, weight.shape[1])[:, order]
    pruned = (weight == 0)[:, order]  # what a stage before took away stays away

    def change(_part: Tensor, places: slice, _roots: Tensor) -> Callable[[Tensor, int], Tensor]:
        def column(values: Tensor, place: int) -> Tensor:
            at = places.start + place
            new = rounded(values, scales[:, at], scheme.grid)
            return new.masked_fill_(pruned[:, at], 0.0)

        return column

    changed = compensated(weight[:, order], moment[order][:, order], change)
    return changed[:, order.argsort()]


def _rounding(scheme: Scheme) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _layer, given: (packed.rounded_inputs(given[0], scheme), *given[1:])


def _account(choice: Choice) -> str:
    if choice.scheme is None:
        return f"as it was: {choice.reason}"
    return choice.scheme.name if choice.reason is None else f"{choice.scheme.name}: {choice.reason}"


def plan_layers(walk: Walk, config: QuantizeConfig) -> dict[str, Choice]:
    """What becomes of each layer, by name, the head among them. See `quantize` for what it raises."""
    scheme = parse_scheme(config.scheme, config.group_size)
    rules = parse_rules(config.local, config.group_size)
    layers = [Layer(name, *shape) for name, shape in walk.linears().items()]
    if not layers:
        others = ", ".join(walk.left_alone()[:4])
        raise UserError(f"the blocks have no linear layer that the format knows; their matrices are {others}")
    head = Layer(walk.head()[0], *walk.head()[1])
    choices = choose([*layers, *([head] if config.head else [])], scheme, rules, config.on_indivisible)
    if not config.head:
        choices[head.name] = Choice(None, "the head, without --head")
    if not any(choice.scheme for choice in choices.values()):
        raise UserError("by these rules no layer is quantized")
    return choices


def _check(config: QuantizeConfig) -> None:
    if config.method not in get_args(Method):
        raise UserError(f"--method {config.method}: choose one of {', '.join(get_args(Method))}")
    if config.dtype not in DTYPES:
        raise UserError(f"--dtype {config.dtype}: choose one of {', '.join(DTYPES)}")
