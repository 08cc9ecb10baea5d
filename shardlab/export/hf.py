"""`shardlab export IN OUT --to hf`: the same model in another dtype, a tensor at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardlab.compress.card import Card, lineage_of, weight_bytes
from shardlab.compress.stage import DTYPES, SHARD_BYTES, output_directory, source_config, write_config
from shardlab.errors import UserError
from shardlab.model.checkpoint import weight_files
from shardlab.train.artifact import write_tensors


@dataclass(frozen=True)
class HfExport:
    """What was written."""

    path: Path
    before: int  # bytes of weights
    after: int

    def text(self) -> str:
        """For people."""
        return f"weights {self.before / 2**20:.2f} -> {self.after / 2**20:.2f} MiB\nmodel: {self.path}"


def export_hf(directory: Path, output: Path, dtype: str) -> HfExport:
    """Write the model in `directory` to `output`, a model directory whose weights are in `dtype` (bf16, fp16, fp32).

    Raises UserError where `directory` is no model of plain weights, and naming a tensor with values that `dtype` can't
    hold.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    config = source_config(directory)
    with output_directory(directory, output) as partial:
        write_tensors(partial, _converted(directory, DTYPES[dtype]), SHARD_BYTES)
        write_config(partial, config, DTYPES[dtype])
        after = weight_bytes(partial)
        figures = {"weight_bytes": {"before": weight_bytes(directory), "after": after}}
        Card("export", {"to": "hf", "dtype": dtype}, directory.name, figures, {}, lineage_of(directory)).write(partial)
    return HfExport(output, weight_bytes(directory), after)


def _converted(directory: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, path in weight_files(directory).items():
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            yield name, tensor
            continue
        stored = tensor.to(dtype)
        if not bool(stored.isfinite().all()) and bool(tensor.isfinite().all()):
            raise UserError(
                f"{name} has values up to {tensor.abs().max().item():g}, which {dtype} can't hold: bf16 can"
            )
        yield name, stored
