"""A checkpoint of ours -> another tool's directory, which is there whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardlab.checkpoint.listing import hidden_name
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.storage import LocalStorage
from shardlab.checkpoint.verification import verify
from shardlab.errors import UserError

TOOLS = ("dcp", "zero3")


def convert_to(directory: Path, output: Path, tool: str, world_size: int | None = None) -> None:
    """Write the checkpoint in `directory` as one of `tool`. `world_size`: the ranks that will load it, of "zero3".

    Raises UserError if `output` exists, the checkpoint is damaged, or the tool can't hold it.
    """
    if tool not in TOOLS:
        raise UserError(f"--to {tool}: choose one of {', '.join(TOOLS)}; a model directory is what export writes")
    if (tool == "zero3") != (world_size is not None):
        needs = "needs" if tool == "zero3" else "takes no"
        raise UserError(f"--to {tool} {needs} --world-size (DeepSpeed loads a checkpoint at one number of ranks)")
    if world_size is not None and world_size < 1:
        raise UserError(f"--world-size {world_size}: at least one rank loads it")
    if output.exists():
        raise UserError(f"{output} exists; it is never overwritten. Remove it or choose another directory")
    verify(directory)
    partial = output.parent / hidden_name(output.name, "partial")
    partial.mkdir(parents=True)
    try:
        with CheckpointReader(directory) as reader:
            if world_size is None:
                from shardlab.checkpoint.dcp_write import write_dcp

                write_dcp(reader, partial)
            else:
                from shardlab.checkpoint.zero_write import ZeRO3Files

                train = reader.manifest.recipe.get("train")
                bf16 = isinstance(train, dict) and train.get("precision") == "bf16"
                ZeRO3Files(reader, world_size, bf16=bf16).write(partial)
        partial.rename(output)
        LocalStorage().sync_directory(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
