"""What a checkpoint holds, for people and scripts: read from its manifest alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.listing import checkpoints
from shardlab.checkpoint.manifest import Manifest
from shardlab.checkpoint.storage import spelled_bytes
from shardlab.checkpoint.verification import examine, read_manifest
from shardlab.errors import UserError


@dataclass(frozen=True)
class Row:
    """A line of `shardlab checkpoint list`; `fault` is set, and the rest unknown, where the manifest can't be read."""

    name: str
    step: int
    bytes: int | None
    evaluation: float | None
    backend: str | None
    world_size: int | None
    fault: str | None

    def text(self) -> str:
        """As people see it."""
        if self.fault is not None:
            return f"{self.name}  DAMAGED: {self.fault}"
        loss = f"  evaluation {self.evaluation:.4f}" if self.evaluation is not None else ""
        saved_by = f"  {self.backend} on {self.world_size}" if self.backend is not None else ""
        return f"{self.name}  {spelled_bytes(self.bytes or 0)}{saved_by}{loss}"


def rows(root: Path) -> list[Row]:
    """The checkpoints of a run. Raises UserError where there is none."""
    found = checkpoints(root)
    if not found:
        raise UserError(f"{root} holds no checkpoint (no directory step-…)")
    return [_row(one.path, one.step) for one in found]


def chosen(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest of the run that it is. Raises UserError where it is neither."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give a run, or one checkpoint of it")
    found = checkpoints(path)
    return found[-1].path if found else path


def verify_all(directory: Path) -> list[dict[str, Any]]:
    """`path` and `faults` of the checkpoint, or of each one of a run; every byte is read."""
    chosen(directory)
    paths = [one.path for one in checkpoints(directory)] or [directory]
    return [{"path": str(path), "faults": examine(path)} for path in paths]


def as_dict(directory: Path) -> dict[str, Any]:
    """Everything but where each piece lies."""
    manifest = read_manifest(directory)
    return {
        "path": str(directory),
        "bytes": sum(file.bytes for file in manifest.files),
        **manifest.model_dump(mode="json", exclude={"tensors"}),
        "tensors": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "pieces": len(entry.pieces),
            }
            for entry in manifest.tensors
        ],
    }


def describe(directory: Path) -> Iterator[str]:
    """The same for people, a line at a time."""
    manifest = read_manifest(directory)
    yield f"{directory}: step {manifest.step}, {spelled_bytes(sum(file.bytes for file in manifest.files))}"
    made_by = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"written by {made_by}" + (f"; goes on from {manifest.parent}" if manifest.parent is not None else "")
    if manifest.evaluation is not None:
        yield f"evaluation loss {manifest.evaluation:.4f}"
    for kind, count, elements, size in kinds(manifest):
        yield f"{kind}: {count} tensors, {elements:,} elements, {spelled_bytes(size)}"
    for title, values in (("schedule", manifest.schedule), ("cursor", manifest.cursor), ("plan", manifest.plan)):
        if values:
            yield f"{title}: " + ", ".join(f"{key} {value}" for key, value in values.items())
    for alias, name in manifest.aliases.items():
        yield f"{alias} is tied to {name}"
    for entry in manifest.tensors:
        pieces = f"{len(entry.pieces)} piece{'s' if len(entry.pieces) != 1 else ''}"
        yield f"  {entry.name}  {entry.kind}  {list(entry.shape)}  {entry.dtype}  {pieces}"


def kinds(manifest: Manifest) -> list[tuple[str, int, int, int]]:
    """(kind, tensors, elements, bytes) of each kind of state."""
    totals: dict[str, tuple[int, int, int]] = {}
    for entry in manifest.tensors:
        count, elements, size = totals.get(entry.kind, (0, 0, 0))
        numel = math.prod(entry.shape)
        totals[entry.kind] = (count + 1, elements + numel, size + numel * DTYPES[entry.dtype].itemsize)
    return [(kind, *total) for kind, total in totals.items()]


def _row(path: Path, step: int) -> Row:
    try:
        manifest = read_manifest(path)
    except UserError as error:
        return Row(path.name, step, None, None, None, None, str(error))
    backend, world_size = manifest.plan.get("backend"), manifest.plan.get("world_size")
    return Row(
        name=path.name,
        step=step,
        bytes=sum(file.bytes for file in manifest.files),
        evaluation=manifest.evaluation,
        backend=backend if isinstance(backend, str) else None,
        world_size=world_size if isinstance(world_size, int) else None,
        fault=None,
    )
