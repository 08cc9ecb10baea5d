"""Prune: weights become zero, or channels of the MLP go altogether, one block at a time."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardlab.compress.card import Card, lineage_of, weight_bytes
from shardlab.compress.moments import Moments
from shardlab.compress.sparsity import Amount, by_magnitude, by_sparsegpt, by_wanda, parse_amount, without_inputs
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

Method = Literal["sparsegpt", "wanda", "magnitude", "channels"]

MASKS = "shardlab_masks.safetensors"
CHANNELS_OF = 8  # their number stays a multiple of it, where it was: matrix products prefer even sizes


@dataclass(frozen=True)
class PruneConfig:
    """`ignore`: patterns of layers' names that stay as they are. `dtype` "auto" is the model's own."""

    method: Method = "sparsegpt"
    sparsity: float | None = None
    pattern: str | None = None
    ignore: tuple[str, ...] = ()
    dtype: str = "auto"


def prune(source: Path, output: Path, config: PruneConfig, rows: Rows, sequence_length: int, say: Say) -> Card:
    """Prune the model in `source` into `output`, which the plain class of `transformers` loads; its card.

    With method "channels" the MLPs become narrower, in the config too, and so the file smaller. With the others
    weights become zero: the file is as large, and says in `MASKS` which they are (one bit each, packed).
    Raises UserError, before anything is computed, for what can't be done, by name.
    """
    model_config = source_config(source)
    if config.method not in get_args(Method):
        raise UserError(f"--method {config.method}: choose one of {', '.join(get_args(Method))}")
    amount = parse_amount(config.sparsity, config.pattern)
    walk = Walk(source, rows.calibration, rows.held_out, sequence_length=sequence_length)
    dtype = _dtype(config.dtype, model_config)
    stage: _Masked | _Narrower
    if config.method == "channels":
        stage = _Narrower(walk, amount, model_config, config.ignore, dtype, say)
    else:
        stage = _Masked(walk, amount, config, dtype, say)
    with output_directory(source, output) as partial:
        write_tensors(partial, walk.run(stage.change), SHARD_BYTES)
        stage.finish(partial, model_config)
        write_config(partial, model_config, dtype)
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

    def __init__(self, walk: Walk, amount: Amount, config: PruneConfig, dtype: torch.dtype, say: Say):
        self._amount = amount
        self._method = config.method
        self._dtype = dtype
        self._say, self._blocks = say, walk.blocks
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
                parameter.copy_(weight.mul_(stays))
                self._masks[name] = _packed(stays)
                self._zeros += int((~stays).sum())
                self._weights += stays.numel()
            yield converted(name, parameter, self._dtype)
        if segment.name:
            self._done += 1
            self._say(f"block {self._done}/{self._blocks}")

    def _pruned(self, weight: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._method == "sparsegpt" and moment is not None:
            return by_sparsegpt(weight, self._amount, moment)
        if self._method == "wanda" and moment is not None:
            return by_wanda(weight, self._amount, moment), weight.clone()
        return by_magnitude(weight, self._amount), weight.clone()  # of a layer that no row reached, too

    def finish(self, directory: Path, _config: dict[str, Any]) -> None:
        """Write the masks."""
        save_file(self._masks, directory / MASKS, metadata={"packing": "numpy.packbits of whether a weight stays"})

    def figures(self) -> dict[str, Any]:
        """For the card: counted, not as asked."""
        return {"pruned_weights": self._zeros, "sparsity": self._zeros / max(self._weights, 1)}


class _Narrower:
    """Channels of each block's MLP go: outputs of the layers before its middle, inputs of those behind."""

    def __init__(
        self, walk: Walk, amount: Amount, config: dict[str, Any], ignore: tuple[str, ...], dtype: torch.dtype, say: Say
    ):
        width = config.get("intermediate_size")
        if amount.share is None or ignore:
            raise UserError("--method channels takes --sparsity alone: every block's MLP has the config's one width")
        before = [name for name, (outputs, _) in walk.linears().items() if outputs == width]
        behind = [name for name, (_, inputs) in walk.linears().items() if inputs == width]
        if not isinstance(width, int) or not before or len(behind) != walk.blocks:
            raise UserError(
                "the channels are not known: not every block has an MLP of linear layers of config.json's "
                f"intermediate_size ({width})"
            )
        if width == walk.head()[1][1]:
            raise UserError(f"the MLPs are as wide as the model ({width}): their channels can't be told from others")
        multiple = CHANNELS_OF if width % CHANNELS_OF == 0 else 1
        self._kept = round(width * (1 - amount.share) / multiple) * multiple
        if not 0 < self._kept < width:
            raise UserError(f"--sparsity {amount.share:g} would leave {self._kept} of {width} channels")
        self._width, self._before, self._behind = width, set(before), set(behind)
        self._dtype, self._say, self._blocks, self._done = dtype, say, walk.blocks, 0
        self.layers = _chosen(walk, (), "as it was")
        self.layers |= dict.fromkeys([*before, *behind], f"{self._kept} of {width} channels")

    def change(self, segment: Segment) -> Iterator[tuple[str, Tensor]]:
        """See `walk.Change`."""
        if segment.name:
            self._narrow(segment)
            self._done += 1
            self._say(f"block {self._done}/{self._blocks}")
        for name, parameter in segment.parameters.items():
            yield converted(name, parameter, self._dtype)

    def _narrow(self, segment: Segment) -> None:
        (behind,) = (name for name in segment.linears if name in self._behind)
        last = segment.linears[behind]
        with Moments({behind: last}) as moments:
            segment.observe()
        moment = moments.get(behind)
        assert moment is not None
        # What a channel adds to the output, by itself: the mean square of its value times its weights' squared norm.
        influence = moment.diagonal() * last.weight.square().sum(0)
        keep = influence.topk(self._kept).indices.sort().values
        _set(segment, behind, last, "weight", without_inputs(last.weight.detach(), moment, keep))
        for name in self._before & segment.linears.keys():
            layer = segment.linears[name]
            for leaf, parameter in list(layer.named_parameters(recurse=False)):
                _set(segment, name, layer, leaf, parameter.detach()[keep].contiguous())

    def finish(self, _directory: Path, config: dict[str, Any]) -> None:
        """Give the config the new width."""
        config["intermediate_size"] = self._kept

    def figures(self) -> dict[str, Any]:
        """For the card."""
        return {"intermediate_size": {"before": self._width, "after": self._kept}}


def _set(segment: Segment, name: str, layer: nn.Linear, leaf: str, value: Tensor) -> None:
    """Another value of another shape; the walk takes the old parameter back when it leaves the block."""
    parameter = nn.Parameter(value, requires_grad=False)
    layer._parameters[leaf] = parameter
    segment.parameters[f"{name}.{leaf}"] = parameter


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


def _packed(stays: Tensor) -> Tensor:
    """(ceil(weights / 8),) bytes, the first weight in the highest bit."""
    return torch.from_numpy(np.packbits(stays.cpu().numpy().reshape(-1)))


def read_masks(directory: Path, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Which weights stay, by the tensor's name; nothing where the directory has no masks. The inverse of `prune`'s."""
    from safetensors.torch import load_file

    path = directory / MASKS
    if not path.is_file():
        return {}
    masks = {}
    for name, packed in load_file(path).items():
        shape = shapes[name]
        bits = np.unpackbits(packed.numpy(), count=shape.numel())
        masks[name] = torch.from_numpy(bits).bool().reshape(shape)
    return masks
