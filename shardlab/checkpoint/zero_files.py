"""DeepSpeed's own checkpoints, stages 0 to 3, as fragments: views of the mapped files, nothing is gathered.

Stages 1 and 2 keep, of each optimizer group, one vector cut into equal parts; stage 3 cuts each tensor. Stage 0 keeps
whole tensors whose optimizer state is known by position only. Padding belongs to no tensor and is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.checkpoint.pickles import load_mapped
from shardlab.checkpoint.save import Contents
from shardlab.errors import UserError
from shardlab.state.box import whole
from shardlab.state.fragment import BUFFER, FROZEN, MASTER, Fragment, OptimizerState
from shardlab.state.held import Held, fragments_of, held_range

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ZeROFiles:
    """The checkpoint `directory` (what `save_checkpoint` was given, or one tag in it). Raises UserError."""

    def __init__(self, directory: Path):
        self.directory = tag_directory(directory)
        self._models = [load_mapped(path) for path in _ranked(self.directory, "_model_states.pt")]
        if not self._models or not isinstance(self._models[0], dict) or "module" not in self._models[0]:
            raise UserError(f"{self.directory} holds no *_model_states.pt of DeepSpeed")
        self._model: dict[str, Any] = self._models[0]
        paths = _ranked(self.directory, "_optim_states.pt")
        self._optimizers = [load_mapped(path)["optimizer_state_dict"] for path in paths]
        self.stage = int(self._optimizers[0].get("zero_stage", 0)) if self._optimizers else 0
        if self._model.get("mp_world_size", 1) != 1:
            raise UserError(f"{self.directory} was saved with model parallelism, which can't be read")
        if self._optimizers:
            self._check()
        self._ties: dict[str, str] = dict(self._model.get("shared_params") or {})

    def _check(self) -> None:
        counts = self._optimizers[0]["partition_count"]
        count = max(counts) if isinstance(counts, list) else counts
        if count != len(self._optimizers):
            raise UserError(
                f"{self.directory} was saved by {count} ranks, but there are {len(self._optimizers)} optimizer files"
            )
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        if key not in self._optimizers[0] or not self._model.get("param_shapes"):
            raise UserError(f"{self.directory} is not of a layout that is known (no {key}): DeepSpeed's stages 0 to 3")
        if self.stage == 3 and len(self._models) != count:
            raise UserError(f"{self.directory} was saved by {count} ranks, but there are {len(self._models)} models")

    def contents(self) -> Contents:
        """Steps, ties and optimizer; DeepSpeed keeps neither our schedule nor our cursor."""
        return Contents(
            step=int(self._model["global_steps"]),
            optimizer=self._stage_0_optimizer() if not self._optimizers else self._optimizer(),
            aliases=self._ties,
            versions={"deepspeed": str(self._model.get("ds_version"))},
            parent=str(self.directory),
        )

    def fragments(self) -> Iterator[Fragment]:
        """All of it, by the names of the module that DeepSpeed had."""
        yield from fragments_of(list(self._untrained()))
        if not self._optimizers:
            yield from fragments_of(list(self._stage_0()))
        elif self.stage == 3:
            yield from fragments_of(list(self._stage_3()))
        else:
            yield from fragments_of(list(self._stage_1_or_2()))

    # --- what is not trained

    def _untrained(self) -> Iterator[Held]:
        for name in self._model.get("buffer_names") or ():
            if name in self._model["module"]:
                yield from _whole(name, {BUFFER: self._model["module"][name]})
        if self.stage != 3:
            yield from self._whole_frozen()
            return
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            for rank, model in enumerate(self._models):
                start, numel = _share(math.prod(shape), rank, len(self._models))
                if numel:
                    part = model["frozen_param_fragments"][name].reshape(-1)[:numel]
                    yield from held_range(name, tuple(shape), start, {FROZEN: part})

    def _whole_frozen(self) -> Iterator[Held]:
        """Stage 1 does not list them (DeepSpeed's own consolidation loses them): what of the module is nothing else."""
        if not self._optimizers:
            return
        trained = {name for shapes in self._model["param_shapes"] for name in shapes}
        others = {*trained, *self._ties, *(self._model.get("buffer_names") or ())}
        for name, value in self._model["module"].items():
            if name not in others:
                yield from _whole(name, {FROZEN: value})

    # --- stages 1 and 2: `shapes[g]` one after another, with paddings, cut into a part for each rank

    def _stage_1_or_2(self) -> Iterator[Held]:
        begins = [0] * len(self._model["param_shapes"])  # the last rank's part is shorter: it is saved without padding
        for state in self._optimizers:
            for group, shapes in enumerate(self._model["param_shapes"]):
                flats = _flats(state, "single_partition_of_fp32_groups", "base_optimizer_state", group)
                paddings = state.get("param_alignment_paddings") or {}
                length = flats[MASTER].numel()
                begin, offset = begins[group], 0
                begins[group] += length
                for position, (name, shape) in enumerate(shapes.items()):
                    numel = math.prod(shape)
                    start, stop = max(offset, begin), min(offset + numel, begin + length)
                    if start < stop:
                        inside = {kind: flat[start - begin : stop - begin] for kind, flat in flats.items()}
                        yield from held_range(name, tuple(shape), start - offset, inside)
                    offset += numel + (paddings[group][position] if paddings else 0)

    # --- stage 3: of each tensor an equal part for each rank, those of a subgroup one after another

    def _stage_3(self) -> Iterator[Held]:
        ranks = len(self._optimizers)
        for rank, state in enumerate(self._optimizers):
            for group, shapes in enumerate(self._model["param_shapes"]):
                flats = _flats(state, "fp32_flat_groups", "optimizer_state_dict", group)
                offset = 0
                for name, shape in shapes.items():
                    start, numel = _share(math.prod(shape), rank, ranks)
                    if numel:
                        inside = {kind: flat[offset : offset + numel] for kind, flat in flats.items()}
                        yield from held_range(name, tuple(shape), start, inside)
                    offset += math.ceil(math.prod(shape) / ranks)

    def _optimizer(self) -> OptimizerState:
        """Steps by name, and the groups; `param_shapes` lists the flat tensors, which the groups count."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        inner = self._optimizers[0][key]
        members = [list(shapes) for shapes in self._model["param_shapes"]]
        return _optimizer_state(inner, members)

    # --- stage 0: torch's own optimizer state, by position

    def _stage_0(self) -> Iterator[Held]:
        inner = self._model.get("optimizer") or {}
        trained = self._stage_0_names()
        for name, value in self._model["module"].items():
            if name in self._ties or name in (self._model.get("buffer_names") or ()):
                continue
            states = {MASTER: value}
            if name in trained:
                kept = inner["state"].get(trained.index(name), {})
                states |= {kind: state for kind, state in kept.items() if _has_shape(state, value)}
            yield from _whole(name, states)

    def _stage_0_names(self) -> list[str]:
        """The names of the optimizer's positions; refused where they don't follow."""
        inner = self._model.get("optimizer")
        if not inner:
            return []
        buffers = self._model.get("buffer_names") or ()
        names = [name for name in self._model["module"] if name not in self._ties and name not in buffers]
        order = [index for group in inner["param_groups"] for index in group["params"]]
        states = [inner["state"].get(index, {}) for index in order]
        fits = len(order) == len(names) and all(
            all(_has_shape(state, self._model["module"][name]) for state in kept.values() if state.dim())
            for name, kept in zip(names, states, strict=True)
        )
        if len(inner["param_groups"]) != 1 or order != list(range(len(order))) or not fits:
            raise UserError(
                f"{self.directory} is of stage 0, whose optimizer state has positions instead of names; with several "
                "groups or frozen tensors they can't be told: save it with stage 1, or convert its weights as a model "
                "directory"
            )
        return names

    def _stage_0_optimizer(self) -> OptimizerState:
        names = self._stage_0_names()
        return _optimizer_state(self._model["optimizer"], [[name] for name in names]) if names else OptimizerState()


def tag_directory(directory: Path) -> Path:
    """The directory of the tag that `latest` names, or `directory` itself. Raises UserError if the tag leads away."""
    latest = directory / "latest"
    if not latest.is_file() or latest.is_symlink():
        return directory
    tag = latest.read_text(encoding="utf-8", errors="replace")[:300].strip()
    chosen = directory / tag
    if not _PLAIN_NAME.fullmatch(tag) or chosen.is_symlink() or not chosen.is_dir():
        raise UserError(f"{latest} names {tag!r}, which is no directory in {directory}")
    return chosen


def _ranked(directory: Path, ending: str) -> list[Path]:
    """The files of all ranks, in their order."""
    found = [path for path in directory.iterdir() if path.name.endswith(ending)]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _flats(state: Mapping[str, Any], masters: str, optimizer: str, group: int) -> dict[str, Tensor]:
    """By kind: the masters of a flat group, and the optimizer's states, which may have padding after them."""
    master: Tensor = state[masters][group]
    inner = state[optimizer]
    if not isinstance(inner, dict):
        raise UserError("an elastic checkpoint of DeepSpeed (elastic_checkpoint: true) can't be read: save it without")
    kept = inner["state"].get(group, {})
    long = {kind: value for kind, value in kept.items() if isinstance(value, Tensor) and value.dim() == 1}
    return {MASTER: master, **{kind: value[: len(master)] for kind, value in long.items()}}


def _optimizer_state(inner: Mapping[str, Any], members: list[list[str]]) -> OptimizerState:
    """`members[i]`: the names in the optimizer's i-th tensor."""
    kinds: dict[str, None] = {}
    scalars: dict[str, dict[str, float]] = {}
    for index, kept in inner["state"].items():
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.dim():
                kinds[key] = None
                continue
            for name in members[index]:
                scalars.setdefault(name, {})[key] = float(value)
    groups = [
        {
            "names": [name for index in group["params"] for name in members[index]],
            **{key: value for key, value in group.items() if key != "params"},
        }
        for group in inner["param_groups"]
    ]
    return OptimizerState(tuple(kinds), scalars, tuple(groups))


def _whole(name: str, states: Mapping[str, Tensor]) -> Iterator[Held]:
    shape = tuple(next(iter(states.values())).shape)
    box = whole(shape)
    if box is not None:
        yield Held(name, shape, box, states)


def _share(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, elements) of a rank's part of a tensor at stage 3."""
    size = math.ceil(numel / ranks)
    start = min(size * rank, numel)
    return start, min(size, numel - start)


def _has_shape(value: object, like: Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape
