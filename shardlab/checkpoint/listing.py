"""The checkpoints of a run: which there are, which is the newest that verifies, which may go.

`latest` is not stored anywhere: it is what a listing says. A directory is there under its own name only when it is
whole; what a dead process left has a name that begins with a dot, and is cleaned away.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardlab.checkpoint.manifest import DamagedError
from shardlab.checkpoint.ranks import Agreement, Alone, Ranks
from shardlab.checkpoint.storage import LocalStorage, Storage
from shardlab.checkpoint.verification import examine, read_manifest
from shardlab.errors import UserError

_STEP = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.(step-\d{8,})\.(partial|replaced|deleted)-[0-9a-f]+")


@dataclass(frozen=True)
class Found:
    """A checkpoint by its name; whether it is whole is another question."""

    step: int
    path: Path


def directory_name(step: int) -> str:
    """`step-00000100` for 100."""
    return f"step-{step:08d}"


def hidden_name(name: str, purpose: str) -> str:
    """A name that no listing takes for a checkpoint: `.step-00000100.partial-1f2e3d4c`."""
    return f".{name}.{purpose}-{secrets.token_hex(4)}"


def checkpoints(root: Path, storage: Storage | None = None) -> list[Found]:
    """Those in `root` (a run directory or its checkpoints/), by step, the newest last."""
    storage = storage or LocalStorage()
    root = root / "checkpoints" if storage.is_directory(root / "checkpoints") else root
    named = [(match, root / name) for name in storage.names(root) if (match := _STEP.fullmatch(name)) is not None]
    found = [Found(int(match[1]), path) for match, path in named if storage.is_directory(path)]
    return sorted(found, key=lambda one: one.step)


def clean(root: Path, storage: Storage | None = None) -> list[str]:
    """Remove what dead saves and deletions left in `root`; a checkpoint that was being replaced is put back.

    For one process, while none saves there. Returns the names that were removed.
    """
    storage = storage or LocalStorage()
    removed = []
    for name in storage.names(root):
        match = _LEFT_OVER.fullmatch(name)
        if match is None:
            continue
        if match[2] == "replaced" and match[1] not in storage.names(root):
            storage.rename(root / name, root / match[1])
        else:
            storage.delete(root / name)
            removed.append(name)
    return removed


def find_newest(
    root: Path, ranks: Ranks | None = None, say: Callable[[str], None] = print, storage: Storage | None = None
) -> Path:
    """The newest checkpoint in `root` whose content is what its manifest says. Collective; each file is read once.

    The first rank names through `say` each newer one that is damaged, and how. Raises UserError if none is left.
    """
    ranks, storage = ranks or Alone(), storage or LocalStorage()
    with Agreement[list[Found]](ranks) as listed:
        listed.value = checkpoints(root, storage) if ranks.rank == 0 else []
    damaged = []
    for one in reversed(listed.values[0]):
        faults = examine_together(one.path, ranks, storage)
        if not faults:
            return one.path
        damaged.append(one.path.name)
        if ranks.rank == 0:
            say(f"checkpoint {one.path} is damaged and not used: {faults[0]}{_more(faults)}")
    if damaged:
        raise UserError(f"no checkpoint in {root} is whole: {', '.join(damaged)} damaged; start anew in another run")
    raise UserError(f"{root} holds no checkpoint (no directory step-…); start the run without --resume")


def examine_together(path: Path, ranks: Ranks, storage: Storage) -> list[str]:
    """All faults of a checkpoint, on every rank; the ranks share out the files. Collective."""
    with Agreement[list[str]](ranks) as agreed:
        agreed.value = examine(path, storage, ranks.rank, ranks.world_size)
    return list(dict.fromkeys(fault for faults in agreed.values for fault in faults))


def verify_together(path: Path, ranks: Ranks | None = None, storage: Storage | None = None) -> None:
    """Read a whole checkpoint, each file by one rank. Collective. Raises DamagedError that names the fault."""
    faults = examine_together(path, ranks or Alone(), storage or LocalStorage())
    if faults:
        raise DamagedError(f"checkpoint {faults[0]}{_more(faults)}")


def delete_older(root: Path, newest: int, keep: int, storage: Storage | None = None) -> list[Path]:
    """Of the checkpoints up to the step `newest`, delete all but the `keep` last and the best by evaluation.

    For one process, when that of `newest` has been verified. One that can't be read any more counts as neither. Those
    of later steps are of a run that went back (the later ones were damaged, perhaps): they are left.
    """
    storage = storage or LocalStorage()
    present = [one for one in checkpoints(root, storage) if one.step <= newest]
    losses: dict[Path, float | None] = {}
    for one in present:
        try:
            losses[one.path] = read_manifest(one.path, storage).evaluation
        except (UserError, OSError):
            continue  # damaged: nothing to keep
    kept = set(list(losses)[-keep:])
    judged = {path: loss for path, loss in losses.items() if loss is not None}
    if judged:
        kept.add(min(judged, key=judged.__getitem__))
    gone = [one.path for one in present if one.path not in kept]
    for path in gone:
        hidden = path.with_name(hidden_name(path.name, "deleted"))
        storage.rename(path, hidden)  # one that is half deleted never has a checkpoint's name
        storage.delete(hidden)
    return gone


def _more(faults: list[str]) -> str:
    return f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
