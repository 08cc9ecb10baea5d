"""A checkpoint of ours -> a PyTorch DCP directory: `{"model": ..., "optimizer": ...}`, as `get_state_dict` names them.

DCP's own writer writes it, asked for one file a tensor: it keeps all tensors of a file until the file ends. Its planner
is told of tensors without values, and reads each when it is about to be written.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from shardlab.checkpoint.foreign import adamw_groups, read_whole, value_entries
from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.manifest import TensorEntry


def write_dcp(reader: CheckpointReader, directory: Path) -> None:
    """Write it all to `directory`, synced. Memory: about two of the largest tensors. Raises UserError."""
    planner = _Planner(reader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is wanted
        dcp.save(
            planner.announced(),
            storage_writer=dcp.FileSystemWriter(directory, single_file_per_rank=False),
            planner=planner,
            no_dist=True,
        )


class _Planner(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]
    """Stands between DCP and the reader."""

    def __init__(self, reader: CheckpointReader):
        super().__init__()
        self._reader = reader
        self._entries: dict[str, TensorEntry] = {}

    def announced(self) -> dict[str, Any]:
        """The state dict, its tensors on the device "meta"."""
        state: dict[str, Any] = {"model": {}}
        for name, entry in value_entries(self._reader).items():
            state["model"][name] = self._empty(f"model.{name}", entry)
        groups = adamw_groups(self._reader)
        if not groups:
            return state
        of_names: dict[str, dict[str, Any]] = {}
        for name in self._reader.names():
            kept: dict[str, Any] = {
                key: torch.tensor(value, dtype=torch.float32)
                for key, value in self._reader.optimizer.scalars.get(name, {}).items()
            }
            for kind in self._reader.optimizer.kinds:
                if kind in self._reader.kinds(name):
                    entry = self._reader.entry(name, kind)
                    kept[kind] = self._empty(f"optimizer.state.{name}.{kind}", entry)
            if kept:
                of_names[name] = kept
        listed = [{"params": group.pop("names"), **group} for group in groups]
        state["optimizer"] = {"state": of_names, "param_groups": listed}
        return state

    def _empty(self, key: str, entry: TensorEntry) -> Tensor:
        self._entries[key] = entry
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """DCP asks for what it writes next."""
        entry = self._entries.get(write_item.index.fqn)
        if entry is not None:
            return read_whole(self._reader, entry)
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        return data
