"""The card of an artifact: where it comes from, what was done to it, and what that cost, as measured."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardlab.errors import UserError
from shardlab.state.masks import MASKS

FILE = "shardlab_card.json"
VERSION = 1


@dataclass(frozen=True)
class Card:
    """One stage's account, and those of the stages before it, the first one first."""

    stage: str
    config: Mapping[str, Any]
    source: str  # name of the directory that it was made from
    figures: Mapping[str, Any]  # before and after; bytes, nats, tokens
    layers: Mapping[str, str]  # what was done to each, by name
    lineage: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(
        default_factory=lambda: {n: version(n) for n in ("shardlab", "torch", "transformers")}
    )
    machine: str = field(default_factory=lambda: f"{platform.machine()} {platform.system()}")

    def write(self, directory: Path) -> None:
        """Into `directory`, as JSON."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")


def add_figures(directory: Path, figures: Mapping[str, Any]) -> None:
    """To those of the card in `directory`."""
    card = read_card(directory)
    if card is None:
        raise UserError(f"{directory} has no {FILE}")
    card["figures"] |= figures
    (directory / FILE).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def read_card(directory: Path) -> dict[str, Any] | None:
    """The card in `directory`, or None. Raises UserError for one that is damaged or of a later version."""
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number = card["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error!r}") from error
    if number > VERSION:
        raise UserError(f"{path} was written by a later shardlab (version {number} of the card)")
    return card


def lineage_of(directory: Path) -> tuple[Mapping[str, Any], ...]:
    """The stages that made `directory`, the first one first, each without its own lineage and list of layers."""
    card = read_card(directory)
    if card is None:
        return ()
    own = {key: value for key, value in card.items() if key not in ("lineage", "layers", "version")}
    return (*card.get("lineage", ()), own)


def weight_bytes(directory: Path) -> int:
    """Bytes on disk of the weights in `directory`."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.name != MASKS)
