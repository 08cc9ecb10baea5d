"""The machines of a plan: these here, or a preset by name (`2x8xH100-80G`). Presets are data; users add theirs."""

import json
import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from shardlab.errors import UserError
from shardlab.planner.calibration import measured
from shardlab.planner.rates import DEVICES_PER_NODE, KEYS, Rates, tabled
from shardlab.topology import host_memory_bytes

GIB = 1024**3


@dataclass(frozen=True)
class Machine:
    """What each rank has. `host_bytes` is the host's memory for each rank of it."""

    name: str
    ranks: int
    accelerator: bool
    memory_bytes: int  # of this rank's device; on a CPU its share of the host's memory
    host_bytes: int
    nodes: int = 1
    rates: Rates | None = None  # None: nothing is known of its speed
    disk_tbw: float | None = None  # terabytes (10^12 bytes) that the disk is rated to take

    def with_ranks(self, ranks: int) -> "Machine":
        """The same with another number of ranks: more nodes of as many devices, where there are several."""
        per_node = self.ranks // self.nodes
        return replace(self, ranks=ranks, nodes=max(1, -(-ranks // per_node)) if self.nodes > 1 else 1)


def this_machine(ranks: int) -> Machine:
    """The one that this process is on, its memory shared by the ranks: the cgroup's limit where there is one."""
    share = host_memory_bytes() // ranks
    import torch

    if torch.accelerator.is_available():
        _free, total = torch.accelerator.get_memory_info(0)
        return Machine("this machine", ranks, True, total, share, rates=measured(ranks, accelerator=True))
    return Machine("this machine", ranks, False, share, share, rates=measured(ranks, accelerator=False))


def parse_hardware(text: str, file: Path | None = None) -> Machine:
    """`2x8xH100-80G`: two nodes of eight ranks, each rank with one. `file` holds presets of the user's, as ours are.

    Without a number of nodes there are as few as the devices of one allow (8, or the preset's `devices_per_node`).
    Raises UserError for a name that is no preset.
    """
    match = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?(.+)", text)
    assert match is not None
    per_node, name = int(match[2] or 1), match[3]
    presets = _presets(file)
    if name not in presets or per_node < 1 or int(match[1] or 1) < 1:
        known = ", ".join(sorted(presets))
        raise UserError(f"--hardware {text}: no preset is named {name!r}; known: {known}; add yours by --hardware-file")
    preset = presets[name]
    ranks, nodes = per_node * int(match[1] or 1), int(match[1] or 1)
    if match[1] is None:
        nodes = -(-ranks // preset.get("devices_per_node", DEVICES_PER_NODE))
    device = preset.get("device_memory_gib")
    host = round(preset["host_memory_gib_per_device"] * GIB)
    rates = tabled(preset, accelerator=device is not None)
    return Machine(
        text,
        ranks,
        device is not None,
        host if device is None else round(device * GIB),
        host,
        nodes,
        rates,
        preset.get("disk_tbw"),
    )


def _presets(file: Path | None) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(
        resources.files("shardlab.planner").joinpath("hardware.json").read_text(encoding="utf-8")
    )
    if file is None:
        return known
    try:
        own = json.loads(file.read_text(encoding="utf-8"))
        return known | {name: _checked(values) for name, values in own.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(
            f"--hardware-file {file}: {error}; expected "
            '{"NAME": {"device_memory_gib": 24, "host_memory_gib_per_device": 64}}, without the device for a CPU, '
            f"for predictions of time {', '.join(KEYS)}, and disk_tbw"
        ) from error


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if key not in ("device_memory_gib", "host_memory_gib_per_device", "disk_tbw", *KEYS):
            raise KeyError(f"unknown key {key}")
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{key} is {value!r}")
    float(values["host_memory_gib_per_device"])
    return values
