"""A checkpoint of ours -> the files that DeepSpeed's own `load_checkpoint` takes at stage 3 on a given number of ranks.

Of each tensor every rank has an equal part, padded at the end; those of an optimizer group (cut into subgroups, as
DeepSpeed does) lie one after another in a flat tensor. A rank's flat tensors are built in files that are mapped, so
they are never in the process's own memory.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.checkpoint.foreign import adamw_groups, read_whole, value_entries
from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.manifest import TensorEntry
from shardlab.errors import UserError
from shardlab.state.box import boxes_of_range
from shardlab.state.fragment import BUFFER, FROZEN, MASTER

SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's default `sub_group_size`, which cuts by a rank's elements


class ZeRO3Files:
    """Writes the checkpoint of `reader` for `ranks` ranks. Raises UserError for another optimizer than AdamW."""

    def __init__(
        self, reader: CheckpointReader, ranks: int, *, bf16: bool = False, sub_group_elements: int = SUB_GROUP_ELEMENTS
    ):
        self._reader = reader
        self._ranks = ranks
        self._entries = {e.name: e for e in reader.manifest.tensors if e.kind in (MASTER, FROZEN, BUFFER)}
        groups = adamw_groups(reader)
        grouped = {name for group in groups for name in group["names"]}
        if not groups or not grouped <= self._entries.keys():
            raise UserError(
                f"{reader.directory} has no optimizer groups of its tensors: export it and start from the model"
            )
        self._subgroups: list[list[str]] = []
        self._param_groups: list[dict[str, Any]] = []
        for group in groups:
            cut = self._cut(group.pop("names"), sub_group_elements)
            first = len(self._subgroups)
            self._subgroups += cut
            self._param_groups.append({**group, "params": list(range(first, len(self._subgroups)))})
        self._frozen = [e for e in self._entries.values() if e.kind != BUFFER and e.name not in grouped]
        self._bf16 = bf16  # DeepSpeed looks for files of another name then

    def write(self, directory: Path) -> None:
        """Write `latest` and the tag's directory into `directory`, synced."""
        tag = directory / f"global_step{self._reader.manifest.step}"
        tag.mkdir()
        for rank in range(self._ranks):
            name = f"zero_pp_rank_{rank}_mp_rank_00"
            _save(self._model(rank), tag / f"{name}_model_states.pt")
            scratch = directory / f".flat-{rank}"
            scratch.mkdir()
            try:
                prefix = "bf16_" if self._bf16 else ""
                _save(self._optimizer(rank, scratch), tag / f"{prefix}{name}_optim_states.pt")
            finally:
                shutil.rmtree(scratch)
        (directory / "latest").write_text(tag.name)

    def _cut(self, names: list[str], limit: int) -> list[list[str]]:
        """A group's tensors in subgroups, each closed by the tensor with which it reaches `limit`."""
        found: list[list[str]] = [[]]
        held = 0
        for name in names:
            if held >= limit:
                found.append([])
                held = 0
            found[-1].append(name)
            held += self._part(self._entries[name])
        return found

    def _part(self, entry: TensorEntry) -> int:
        """Elements of a tensor that each rank has, padding included."""
        return math.ceil(math.prod(entry.shape) / self._ranks)

    def _model(self, rank: int) -> dict[str, Any]:
        """Names and shapes; values only of what is not trained."""
        values = value_entries(self._reader)
        return {
            "module": OrderedDict(
                (name, read_whole(self._reader, entry) if entry.kind == BUFFER else torch.empty(0))
                for name, entry in values.items()
            ),
            "buffer_names": [name for name, entry in values.items() if entry.kind == BUFFER],
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, torch.Size(self._entries[name].shape)) for name in names)
                for names in self._subgroups
            ],
            "frozen_param_shapes": OrderedDict((e.name, torch.Size(e.shape)) for e in self._frozen),
            "frozen_param_fragments": OrderedDict((e.name, self._frozen_part(e, rank)) for e in self._frozen),
            "shared_params": dict(self._reader.manifest.aliases),
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": self._reader.manifest.step,
            "dp_world_size": self._ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": version("deepspeed"),
        }

    def _optimizer(self, rank: int, scratch: Path) -> dict[str, Any]:
        """Masters and moments of a rank, mapped from files in `scratch`."""
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        kinds = self._reader.optimizer.kinds
        state: dict[int, dict[str, Tensor]] = {}
        masters: list[Tensor] = []
        for number, names in enumerate(self._subgroups):
            masters.append(self._flat(names, None, rank, scratch / f"{number}-master"))
            if kinds:
                state[number] = {"step": torch.tensor(self._steps(names), dtype=torch.float32)}
                state[number] |= {kind: self._flat(names, kind, rank, scratch / f"{number}-{kind}") for kind in kinds}
        return {
            "optimizer_state_dict": {
                "zero_stage": 3,
                "loss_scaler": LossScaler(scale=1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": self._ranks,
                "optimizer_state_dict": {"state": state, "param_groups": self._param_groups},
                "fp32_flat_groups": masters,
            },
            "ds_config": {},
            "ds_version": version("deepspeed"),
        }

    def _steps(self, names: list[str]) -> float:
        """A flat tensor has one count: the highest of its members'."""
        return max((self._reader.optimizer.scalars.get(name, {}).get("step", 0.0) for name in names), default=0.0)

    def _flat(self, names: list[str], kind: str | None, rank: int, file: Path) -> Tensor:
        """A rank's parts of `names` one after another; `kind` None is their value. What is not there is zero."""
        size = sum(self._part(self._entries[name]) for name in names)
        flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)  # a new file reads as zeros
        offset = 0
        for name in names:
            entry = self._entries[name]
            of_kind = kind or entry.kind
            if of_kind in self._reader.kinds(name):
                self._read_part(entry, of_kind, rank, flat[offset:])
            offset += self._part(entry)
        return flat

    def _frozen_part(self, entry: TensorEntry, rank: int) -> Tensor:
        part = torch.zeros(self._part(entry), dtype=DTYPES[entry.dtype])
        self._read_part(entry, entry.kind, rank, part)
        return part

    def _read_part(self, entry: TensorEntry, kind: str, rank: int, into: Tensor) -> None:
        numel, part = math.prod(entry.shape), self._part(entry)
        start, stop = min(part * rank, numel), min(part * (rank + 1), numel)
        done = 0
        for box in boxes_of_range(entry.shape, start, stop):
            self._reader.read_into(entry.name, kind, box, into[done : done + box.numel].view(box.lengths))
            done += box.numel


def _save(content: dict[str, Any], path: Path) -> None:
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
