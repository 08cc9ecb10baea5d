"""What `shardlab doctor --calibrate` has measured of this machine, kept in the user's cache directory.

Where it has not been run there are figures of another CPU machine (`calibration.json` here), for as many threads as a
rank has.
"""

import json
import platform
from collections.abc import Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from shardlab.planner.rates import Rates
from shardlab.runtime.extensions import cache_root
from shardlab.topology import core_count

VERSION = 2
MEASURED_ERROR, OTHERS_ERROR = 0.25, 0.5
MEASURED = "measured on this machine by shardlab doctor --calibrate"
OTHERS = "those of another CPU machine; shardlab doctor --calibrate measures this one"


def file() -> Path:
    """Where it is kept."""
    return cache_root() / "calibration.json"


def identity() -> dict[str, Any]:
    """What the figures are of: they are passed over once it is another."""
    return {
        "version": VERSION,
        "processor": _processor(),
        "cores": core_count(),
        "torch": metadata.version("torch"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def read() -> dict[str, Any] | None:
    """The figures of this machine; None where there are none, or of what it was before."""
    try:
        found: dict[str, Any] = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("identity") == identity() else None


def write(figures: Mapping[str, Any]) -> Path:
    """Keep `figures` (`ranks`, `process`, `disk`), there whole or not at all."""
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"identity": identity(), **figures}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def measured(ranks: int, *, accelerator: bool) -> Rates | None:
    """Rates of each of `ranks` ranks on this machine; an accelerator's only where they were measured."""
    found = read()
    if found is not None and found.get("accelerator", False) == accelerator:
        cores = None if accelerator else core_count()
        return rates(found["ranks"], ranks, cores, MEASURED, MEASURED_ERROR, found.get("disk", {}))
    if accelerator:
        return None
    others = json.loads(resources.files("shardlab.planner").joinpath("calibration.json").read_text(encoding="utf-8"))
    return rates(others["ranks"], ranks, core_count(), OTHERS, OTHERS_ERROR, others["disk"])


def rates(
    by_ranks: Mapping[str, Any], ranks: int, cores: int | None, source: str, error: float, disk: Mapping[str, float]
) -> Rates:
    """Rates for each of `ranks` ranks, from figures of one process alone and of two at once.

    On a CPU (`cores`) a rank has its share of them as threads, and more ranks than two share what two had of memory and
    links; an accelerator has what it has.
    """
    figures, links = by_ranks["1" if ranks == 1 else "2"], by_ranks["2"]
    threads = cores / ranks if cores is not None else 1.0
    speed = threads / figures["threads"] if cores is not None else 1.0
    share = min(1.0, 2 / ranks) if cores is not None else 1.0
    slow = max(1.0, 1 / threads)  # ranks that take turns on a core
    return Rates(
        source=source,
        products={precision: rate * speed for precision, rate in figures["products"].items()},
        attention={precision: rate * speed for precision, rate in figures["attention"].items()},
        memory=figures["memory"] * share,
        stream=figures["stream"] * share,
        link={name: rate * share for name, rate in links["link"].items()},
        network=None,
        host_link=figures.get("host_link", figures["stream"] / 2) * share,
        host_memory=figures.get("host_memory", figures["stream"]) * share,
        operation=figures["operation"] * slow,
        hop=links["hop"] * slow,
        network_hop=links["hop"] * slow,
        overlaps=cores is None,
        error=error,
        disk=disk.get("both"),
        reached={p: {int(tokens): share for tokens, share in by.items()} for p, by in figures["reached"].items()},
    )
