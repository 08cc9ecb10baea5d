"""Prune: weights become zero, or whole parts of the model go, one block at a time."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shardlab.compress.card import Card, lineage_of, weight_bytes
from shardlab.compress.moments import Moments
from shardlab.compress.sparsity import Amount, Cutoff, by_magnitude, by_sparsegpt, by_wanda, parse_amount
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
from shardlab.compress.structured import FewerExperts, Kept, Narrower, Shallower, What
from shardlab.compress.units import By
from shardlab.compress.walk import Segment, Walk
from shardlab.errors import UserError
from shardlab.state.masks import MASKS, Masks, packed
from shardlab.train.artifact import write_tensors

Method = Literal["sparsegpt", "wanda", "magnitude", "channels", "groups", "layers", "experts"]


@dataclass(frozen=True)
class PruneConfig:
    """`ignore`: patterns of layers' names that stay as they are. `dtype` "auto" is the model's own.

    `by`: of what goes as a whole, what is measured to choose it; `keep`: how many stay. `scope` global: weights of all
    layers are compared with each other, by magnitude.
    """

    method: Method = "sparsegpt"
    sparsity: float | None = None
    pattern: str | None = None
    ignore: tuple[str, ...] = ()
    dtype: str = "auto"
    by: By = "influence"
    keep: int | None = None
    scope: Literal["layer", "global"] = "layer"


def prune(source: Path, output: Path, config: PruneConfig, rows: Rows, sequence_length: int, say: Say) -> Card:
    """Prune the model in `source` into `output`, which the plain class of `transformers` loads; its card.

    With method "channels", "groups", "layers" or "experts" these go, in the config too, and so the file is smaller.
    With the others weights become zero: the file is as large, and says in `MASKS` which (one bit each, packed).
    Raises UserError, before anything is computed, for what can't be done, by name.
    """
    model_config = source_config(source)
    _check(config)
    walk = Walk(source, rows.calibration, rows.held_out, sequence_length=sequence_length)
    dtype = _dtype(config.dtype, model_config)
    stage: _Masked | Narrower | Shallower | FewerExperts
    kept = Kept(config.sparsity, config.keep)
    if config.method == "channels" or config.method == "groups":
        stage = Narrower(walk, config.method, kept, model_config, config.by, dtype, say)
    elif config.method == "layers":
        stage = Shallower(walk, kept, model_config, config.by, dtype, say)
    elif config.method == "experts":
        stage = FewerExperts(walk, kept, model_config, config.by, dtype, say)
    else:
        stage = _Masked(walk, parse_amount(config.sparsity, config.pattern), config, model_config, dtype, say)
    stage.masks = Masks.read(source)
    with output_directory(source, output) as partial:
        write_tensors(partial, walk.run(stage.change), SHARD_BYTES)
        stage.finish(partial)
        write_config(partial, stage.config, dtype)
        card = Card(
            "prune",
            {**asdict(config), "calibration_tokens": rows.tokens},
            source.name,
            {
                **quality_figures(walk.quality),
                "weight_bytes": {"before": weight_bytes(source), "after": weight_bytes(partial)},
                **stage.figures(),
            },
            stage.layers,
            lineage_of(source),
        )
        card.write(partial)
    return card


class _Masked:
    """Weights become zero."""

    def __init__(
        self,
        walk: Walk,
        amount: Amount,
        config: PruneConfig,
        model_config: dict[str, Any],
        dtype: torch.dtype,
        say: Say,
    ):
        self.config = model_config
        self._amount = amount
        self._method = config.method
        self._dtype = dtype
        self._say, self._blocks = say, walk.blocks
        self.masks = Masks()  # of a stage before: those weights go too
        self._masks: dict[str, Tensor] = {}
        self._zeros = self._weights = self._done = 0
        self.layers = _chosen(walk, config.ignore, amount.name)
        wrong = [
            f"{name} ({inputs} inputs)"
            for name, (_, inputs) in walk.linears().items()
            if amount.of and inputs % amount.of and self.layers[name] == amount.name
        ]
        if wrong:
            raise UserError(f"--pattern {amount.name} doesn't divide {', '.join(wrong[:8])}: --ignore leaves them out")
        self._cutoff = None
        if config.scope == "global":
            names = [f"{name}.weight" for name, account in self.layers.items() if account == amount.name]
            assert amount.share is not None
            self._cutoff = Cutoff.find(lambda: map(walk.weights.tensor, names), amount.share)

    def change(self, segment: Segment) -> Iterator[tuple[str, Tensor]]:
        """See `walk.Change`."""
        mine = {n: layer for n, layer in segment.linears.items() if self.layers.get(n) == self._amount.name}
        moments = Moments(mine)
        if mine and self._method != "magnitude":
            with moments:
                segment.observe()
        for name, parameter in segment.parameters.items():
            layer = name.removesuffix(".weight")
            if layer in mine:
                stays, weight = self._pruned(parameter.detach(), moments.get(layer))
                if name in self.masks:
                    stays &= self.masks.stays(name, tuple(stays.shape))
                parameter.copy_(weight.mul_(stays))
                self._masks[name] = packed(stays)
                self._zeros += int((~stays).sum())
                self._weights += stays.numel()
            elif name in self.masks:
                self._masks[name] = self.masks.packed[name]
            yield converted(name, parameter, self._dtype)
        if segment.name:
            self._done += 1
            self._say(f"block {self._done}/{self._blocks}")

    def _pruned(self, weight: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._method == "sparsegpt" and moment is not None:
            return by_sparsegpt(weight, self._amount, moment)
        if self._method == "wanda" and moment is not None:
            return by_wanda(weight, self._amount, moment), weight.clone()
        if self._cutoff is not None:
            return self._cutoff.stays(weight), weight.clone()
        return by_magnitude(weight, self._amount), weight.clone()  # of a layer that no row reached, too

    def finish(self, directory: Path) -> None:
        """Write the masks."""
        (directory / MASKS).write_bytes(Masks(self._masks).dump())

    def figures(self) -> dict[str, Any]:
        """For the card: counted, not as asked."""
        return {"pruned_weights": self._zeros, "sparsity": self._zeros / max(self._weights, 1)}


def _check(config: PruneConfig) -> None:
    """Raises UserError for a choice that is none, and for options that say nothing of this method."""
    for option, value, choices in (
        ("method", config.method, get_args(Method)),
        ("by", config.by, get_args(By)),
        ("scope", config.scope, ("layer", "global")),
    ):
        if value not in choices:
            raise UserError(f"--{option} {value}: choose one of {', '.join(choices)}")
    if config.method in get_args(What):
        if config.pattern is not None or config.ignore:
            raise UserError(f"--method {config.method} takes --sparsity or --keep: as many {config.method} everywhere")
        if (config.sparsity is None) == (config.keep is None):
            raise UserError("give either --sparsity, the share that goes, or --keep, how many stay")
        if config.sparsity is not None:
            parse_amount(config.sparsity, None)
    elif config.keep is not None:
        raise UserError(f"--keep is for {', '.join(get_args(What))}; --method {config.method} takes --sparsity")
    if config.scope == "global" and (config.method != "magnitude" or config.pattern is not None):
        raise UserError("--scope global compares all layers' weights: it takes --method magnitude and --sparsity")


def _chosen(walk: Walk, ignore: tuple[str, ...], account: str) -> dict[str, str]:
    """What is done to each linear layer of the blocks, by name. Raises UserError for a pattern that matches none."""
    names = list(walk.linears())
    if not names:
        raise UserError(f"the blocks have no linear layers; their matrices are {', '.join(walk.left_alone()[:4])}")
    for pattern in ignore:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"--ignore {pattern!r} matches no layer; layers are named like {names[0]!r}")
    left = {name for name in names if any(fnmatchcase(name, pattern) for pattern in ignore)}
    if len(left) == len(names):
        raise UserError("--ignore leaves no layer to prune")
    return {name: "as it was" if name in left else account for name in names}


def _dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UserError(f"--dtype {name}: choose auto or one of {', '.join(DTYPES)}")
    stored = str(config.get("dtype", config.get("torch_dtype", "float32")))
    found = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    return found.get(stored, torch.float32)
