"""A checkpoint of ours as other tools want it: the model's tensors under all their names, and AdamW's groups."""

from __future__ import annotations

from typing import Any

import torch

from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.manifest import TensorEntry
from shardlab.errors import UserError
from shardlab.state.box import whole
from shardlab.state.fragment import BUFFER, FROZEN, MASTER

VALUES = (MASTER, FROZEN, BUFFER)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def value_entries(reader: CheckpointReader) -> dict[str, TensorEntry]:
    """The model's tensors by every name that they have, ties included."""
    found = {entry.name: entry for entry in reader.manifest.tensors if entry.kind in VALUES}
    ties = {alias: found[name] for alias, name in reader.manifest.aliases.items() if name in found}
    return found | ties


def read_whole(reader: CheckpointReader, entry: TensorEntry) -> torch.Tensor:
    """A tensor of the checkpoint, in memory."""
    value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    box = whole(entry.shape)
    if box is not None:
        reader.read_into(entry.name, entry.kind, box, value)
    return value


def adamw_groups(reader: CheckpointReader) -> list[dict[str, Any]]:
    """The groups of torch's AdamW, each with `names`; options that it lacks have torch's defaults.

    Raises UserError where the checkpoint's optimizer is another one.
    """
    unknown = sorted(set(reader.optimizer.kinds) - set(MOMENTS))
    if unknown:
        raise UserError(
            f"{reader.directory} was saved with an optimizer that keeps {', '.join(unknown)}: only AdamW's state "
            f"({', '.join(MOMENTS)}) can be converted; export takes the weights"
        )
    default = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    default.pop("params")
    return [
        {"names": list(group["names"])} | {key: group.get(key, value) for key, value in default.items()}
        for group in reader.optimizer.groups
    ]
