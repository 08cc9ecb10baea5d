"""Quantize: fewer bits for each weight, the linear layers of one block at a time."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from shardlab.compress import packed
from shardlab.compress.card import Card, lineage_of, weight_bytes
from shardlab.compress.moments import Moments
from shardlab.compress.second_order import compensated, output_error
from shardlab.compress.sensitivity import allot, measure
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
from shardlab.model.grid import find_scales, for_columns, rounded
from shardlab.model.schemes import Choice, Indivisible, Layer, Scheme, choose, parse_rules, parse_scheme
from shardlab.train.artifact import write_tensors

Method = Literal["gptq", "rtn"]

WIDTHS = (3, 4, 5, 6, 8)  # tried for --target-bits
TRIAL_BATCHES = 2  # of the calibration rows: each trial sees them


@dataclass(frozen=True)
class QuantizeConfig:
    """`local`: PATTERN=SCHEME or PATTERN=none, the last that matches a layer's name wins.

    `target_bits`: what a weight may take on average on the disk; then `widths` are allotted to the layers without a
    rule by what each costs, as measured, and `scheme` says nothing.
    """

    scheme: str = "int4"
    group_size: int | None = None
    method: Method = "gptq"
    local: tuple[str, ...] = ()
    head: bool = False
    on_indivisible: Indivisible = "error"
    dtype: str = "bf16"
    target_bits: float | None = None
    widths: tuple[int, ...] = WIDTHS


def quantize(source: Path, output: Path, config: QuantizeConfig, rows: Rows, sequence_length: int, say: Say) -> Card:
    """Quantize the model in `source` into `output`, a directory that transformers and vLLM load; its card.

    Raises UserError, before anything is computed, for what can't be done: groups that don't divide, by layer; a
    model without linear layers.
    """
    packed.require()
    model_config = source_config(source)
    _check(config)
    walk = Walk(source, rows.calibration, rows.held_out, sequence_length=sequence_length)
    costs: dict[str, dict[Scheme, float]] = {}
    if config.target_bits is None:
        choices = plan_layers(walk, config)
    else:
        choices, costs = _allotted(walk, config, rows, say)
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
                "bits_per_weight": stage.bits / stage.weights,
                **_sensitivity(costs),
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
        self.bits = self.weights = 0  # stored for the layers that are quantized, and their elements
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
                self.bits += 8 * tensor.numel() * tensor.element_size()
                yield f"{layer}.{suffix}", tensor
            self.weights += parameter.numel()
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


def _allotted(
    walk: Walk, config: QuantizeConfig, rows: Rows, say: Say
) -> tuple[dict[str, Choice], dict[str, dict[Scheme, float]]]:
    """(a choice for each layer, so that they keep `target_bits`; what each of the others cost)."""
    assert config.target_bits is not None
    by_width = [plan_layers(walk, replace(config, scheme=f"int{width}")) for width in config.widths]
    patterns = list(parse_rules(config.local, config.group_size))
    shapes = {**walk.linears(), walk.head()[0]: walk.head()[1]}
    options: dict[str, dict[Scheme, Choice]] = {}
    fixed: dict[str, Scheme] = {}
    for name, choice in by_width[0].items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            if choice.scheme is not None:
                fixed[name] = choice.scheme
            continue
        for choices in by_width:
            scheme = choices[name].scheme
            if scheme is not None:
                options.setdefault(name, {})[scheme] = choices[name]
    if not options:
        raise UserError("--target-bits: the rules leave no layer to allot bits to")
    allot({n: dict.fromkeys(of, 0.0) for n, of in options.items()}, shapes, config.target_bits, fixed)  # that it can be
    say(f"measuring {sum(map(len, options.values()))} trials of {len(options)} layers")
    candidates = {name: list(of_layer) for name, of_layer in options.items()}
    costs = measure(walk, candidates, DTYPES[config.dtype], rows.calibration[:TRIAL_BATCHES])
    found = allot(costs, shapes, config.target_bits, fixed)
    counts = Counter(scheme.name for scheme in found.schemes.values())
    say(f"{found.bits:.3f} bits for a weight: " + ", ".join(f"{counts[name]} x {name}" for name in sorted(counts)))
    chosen = {name: options[name][scheme] for name, scheme in found.schemes.items() if name in options}
    return {name: chosen.get(name, choice) for name, choice in by_width[0].items()}, costs


def _sensitivity(costs: Mapping[str, Mapping[Scheme, float]]) -> dict[str, Any]:
    """For the card: nats for a token, by layer and scheme."""
    if not costs:
        return {}
    return {"sensitivity": {n: {scheme.name: cost for scheme, cost in of.items()} for n, of in costs.items()}}


def _check(config: QuantizeConfig) -> None:
    if not config.widths or not set(config.widths) <= set(range(2, 9)):
        raise UserError(f"--widths {', '.join(map(str, config.widths))}: choose widths of 2 to 8 bits")
    if config.method not in get_args(Method):
        raise UserError(f"--method {config.method}: choose one of {', '.join(get_args(Method))}")
    if config.dtype not in DTYPES:
        raise UserError(f"--dtype {config.dtype}: choose one of {', '.join(DTYPES)}")
