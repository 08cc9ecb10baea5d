"""Parts of a model that go altogether: channels, key-value groups, blocks, experts. The plain class loads what is left.

Which ones go is said by what they add over the calibration text, and how many before anything is computed: the config
of what is left is built and its tensors' shapes compared with those that will be written.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardlab.compress.experts import config_of_experts, cut_experts, expert_scores, experts_of
from shardlab.compress.layers import block_scores, config_of_layers, largest, renumbered, shapes_of_layers
from shardlab.compress.moments import Moments
from shardlab.compress.stage import Say, converted
from shardlab.compress.units import By, Units, channels, config_of_groups, cut, elements, groups, unit_scores
from shardlab.compress.walk import Segment, Walk
from shardlab.errors import UserError
from shardlab.model.build import build_shell
from shardlab.recipe import ModelSection
from shardlab.state.masks import MASKS, Masks, packed

What = Literal["channels", "groups", "layers", "experts"]

CHANNELS_OF = 8  # their number stays a multiple of it, where it was: matrix products prefer even sizes


class _Cutter:
    """What all have in common. `config` is that of what is left.

    What `masks` say is zero stays zero: they are cut as the weights are, and written beside them.
    """

    config: dict[str, Any]
    layers: dict[str, str]
    masks = Masks()

    def __init__(self, walk: Walk, by: By, dtype: torch.dtype, say: Say):
        self._walk, self._by, self._dtype, self._say, self._done = walk, by, dtype, say, 0
        self._left: dict[str, Tensor] = {}  # of the masks

    def change(self, segment: Segment) -> Iterator[tuple[str, Tensor]]:
        """See `walk.Change`."""
        if segment.name:
            with torch.no_grad():
                for name, value in self._changed(segment).items():
                    _set(segment, name, value)
                self._mask(segment)
            self._done += 1
            self._say(f"block {self._done}/{self._walk.blocks}")
        for name, parameter in segment.parameters.items():
            written = self._written(name)
            if written is not None:
                yield converted(written, parameter, self._dtype)

    def _changed(self, segment: Segment) -> dict[str, Tensor]:
        raise NotImplementedError

    def _mask(self, segment: Segment) -> None:
        for name, parameter in segment.parameters.items():
            written = self._written(name)
            if name in self.masks and written is not None:
                stays = self._cut(name, self.masks.stays(name, self._walk.shapes()[name]))
                parameter.mul_(stays)  # what was made up for has filled it
                self._left[written] = packed(stays)

    def _written(self, name: str) -> str | None:
        return name

    def _cut(self, _name: str, tensor: Tensor) -> Tensor:
        """Of a tensor of the block that was just changed, in its first shape, what is left."""
        return tensor

    def finish(self, directory: Path) -> None:
        """Write what is left of the masks."""
        if self._left:
            (directory / MASKS).write_bytes(Masks(self._left).dump())

    def figures(self) -> dict[str, Any]:
        """For the card."""
        raise NotImplementedError


class Narrower(_Cutter):
    """Channels of each block's MLP, or key-value groups of its attention: as many in each block, of its own choice."""

    def __init__(
        self, walk: Walk, what: What, kept: "Kept", config: Mapping[str, Any], by: By, dtype: torch.dtype, say: Say
    ):
        super().__init__(walk, by, dtype, say)
        units = channels(walk, config) if what == "channels" else groups(walk, config)
        self._count = units[0].count
        multiple = CHANNELS_OF if what == "channels" and self._count % CHANNELS_OF == 0 else 1
        self._kept = kept.of(self._count, what, multiple)
        if what == "channels":
            self._key, self.config = "intermediate_size", {**config, "intermediate_size": self._kept}
        else:
            self._key, self.config = "num_key_value_heads", config_of_groups(config, self._kept)
        self._units: list[Units] = units
        account = f"{self._kept} of {self._count} {what}"
        self.layers = dict.fromkeys(walk.linears(), "as it was")
        for one in units:
            self.layers |= dict.fromkeys([*one.before, one.behind], account)
        shapes = walk.shapes()
        for one in units:
            shapes |= one.shapes(walk.shapes(), self._kept)
        check_config(self.config, shapes)

    def _changed(self, segment: Segment) -> dict[str, Tensor]:
        units = self._units[self._done]
        moment = None
        if self._by != "magnitude":
            with Moments({units.behind: segment.linears[units.behind]}) as moments:
                segment.observe()
            moment = moments.get(units.behind)
        scores = unit_scores(units, segment.linears, self._by, moment)
        keep = self._stay = scores.topk(self._kept).indices.sort().values
        return cut(units, segment.linears, keep, moment)

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        units, layer = self._units[self._done], name.rpartition(".")[0]
        if layer == units.behind and tensor.dim() > 1:
            return tensor[:, elements(self._stay, units.width)]
        return tensor[elements(self._stay, units.before[layer])] if layer in units.before else tensor

    def figures(self) -> dict[str, Any]:
        """See `_Cutter`."""
        return {self._key: {"before": self._count, "after": self._kept}}


class Shallower(_Cutter):
    """Whole blocks go, chosen by one pass over the model as it is."""

    def __init__(self, walk: Walk, kept: "Kept", config: Mapping[str, Any], by: By, dtype: torch.dtype, say: Say):
        super().__init__(walk, by, dtype, say)
        number = kept.of(walk.blocks, "layers")
        blocks = walk.blocks_name
        # Which ones stay is not known yet, and no matter for how many there are.
        first = list(range(number))
        check_config(config_of_layers(config, first, walk.blocks), shapes_of_layers(walk.shapes(), blocks, first))
        self._scores = block_scores(walk, by)
        self._keep = largest(self._scores, number)
        self.config = config_of_layers(config, self._keep, walk.blocks)
        check_config(self.config, shapes_of_layers(walk.shapes(), blocks, self._keep))
        self.layers = {}
        for index, score in enumerate(self._scores):
            name = renumbered(f"{blocks}.{index}.", blocks, self._keep)
            account = "gone" if name is None else f"now {name.rstrip('.')}"
            self.layers[f"{blocks}.{index}"] = f"{account} ({by} {score:.4g})"

    def _changed(self, segment: Segment) -> dict[str, Tensor]:
        segment.gone = self._done not in self._keep
        return {}

    def _written(self, name: str) -> str | None:
        return renumbered(name, self._walk.blocks_name, self._keep)

    def figures(self) -> dict[str, Any]:
        """See `_Cutter`."""
        return {
            "num_hidden_layers": {"before": self._walk.blocks, "after": len(self._keep)},
            "layers_kept": self._keep,
            "layer_scores": self._scores,
        }


class FewerExperts(_Cutter):
    """Experts of each block's mixture: as many in each, of its own choice."""

    def __init__(self, walk: Walk, kept: "Kept", config: Mapping[str, Any], by: By, dtype: torch.dtype, say: Say):
        super().__init__(walk, by, dtype, say)
        self._experts = experts_of(walk, config)
        self._count = next(one.count for one in self._experts if one is not None)
        self._kept = kept.of(self._count, "experts")
        self.config = config_of_experts(config, self._kept)
        shapes = walk.shapes()
        self.layers = {}
        for one in self._experts:
            if one is not None:
                shapes |= one.shapes(walk.shapes(), self._kept)
                self.layers[one.module] = f"{self._kept} of {self._count} experts"
        check_config(self.config, shapes)

    def _changed(self, segment: Segment) -> dict[str, Tensor]:
        experts = self._experts[self._done]
        if experts is None:
            return {}
        keep = self._stay = expert_scores(experts, segment, self._by).topk(self._kept).indices.sort().values
        return cut_experts(experts, segment, keep)

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        experts = self._experts[self._done]
        gone = experts is not None and name in (*experts.tensors, *experts.router)
        return tensor[self._stay] if gone else tensor

    def figures(self) -> dict[str, Any]:
        """See `_Cutter`."""
        return {"experts": {"before": self._count, "after": self._kept}}


class Kept:
    """How many stay: a `share` goes, or a `number` stays."""

    def __init__(self, share: float | None, number: int | None):
        self._share, self._number = share, number

    def of(self, count: int, what: str, multiple: int = 1) -> int:
        """Of `count`. Raises UserError where that is none of them, or all."""
        kept = self._number
        if self._share is not None:
            kept = round(count * (1 - self._share) / multiple) * multiple
        assert kept is not None
        if not 0 < kept < count:
            asked = f"--keep {kept}" if self._share is None else f"--sparsity {self._share:g}"
            raise UserError(f"{asked} would leave {kept} of {count} {what}")
        return kept


def check_config(config: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
    """Raises UserError, naming a tensor, where the plain class by `config` has others than `shapes`."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = build_shell(ModelSection(path=temporary), vocabulary=1, sequence_length=1)
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            mine, theirs = (
                tuple(found) if found is not None else "missing" for found in (shapes.get(name), wanted.get(name))
            )
            raise UserError(
                f"{type(model).__name__} has no config for that: {name} would be {mine}, by the config it is {theirs}"
            )


def _set(segment: Segment, name: str, value: Tensor) -> None:
    """Another value of another shape; the walk takes the old parameter back when it leaves the block."""
    module, leaf = name.removeprefix(f"{segment.name}.").rsplit(".", 1)
    parameter = nn.Parameter(value, requires_grad=False)
    segment.module.get_submodule(module)._parameters[leaf] = parameter
    segment.parameters[name] = parameter
