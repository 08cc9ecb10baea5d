"""The form that every benchmark reports in: hardware, versions, command, table, targets.

Ratios are to a peer that was measured in the same run, on the same machine: only those can be compared with figures
taken elsewhere.
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "shardlab")
MiB, GiB = 1024**2, 1024**3


@dataclass(frozen=True)
class Target:
    """What a figure has to be: `value` at most `limit`."""

    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.3f}, target at most {self.limit:g}: {'met' if self.met else 'MISSED'}"


@dataclass
class Report:
    """One benchmark's result. A row holds a value for each of `columns`; strings are shown as they are, None as "-"."""

    title: str
    columns: Mapping[str, str]  # column -> format of its numbers, such as ".2f"
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: Sequence[str] = ()
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def text(self) -> str:
        """The report as people read it; the table is Markdown."""
        load = f"{self.load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
        head = [
            self.title,
            f"hardware: {hardware()}",
            f"versions: {', '.join(f'{name} {version}' for name, version in versions().items())}",
            f"command: {command()}",
            f"load (1 min): {load}",
        ]
        return "\n".join([*head, "", *self._table(), "", *map(str, self.targets), *self.notes])

    def json(self) -> str:
        """The same for scripts."""
        values = {
            "title": self.title,
            "hardware": hardware(),
            "versions": versions(),
            "command": command(),
            "load": [self.load_before, os.getloadavg()[0]],
            "rows": self.rows,
            "targets": [vars(target) | {"met": target.met} for target in self.targets],
            "notes": list(self.notes),
        }
        return json.dumps(values, indent=1)

    def print(self, as_json: bool) -> None:
        """To stdout; progress goes to stderr."""
        print(self.json() if as_json else self.text(), flush=True)

    def _table(self) -> list[str]:
        cells = [[_cell(row.get(name), form) for name, form in self.columns.items()] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]

        def line(values: Sequence[str]) -> str:
            first, *rest = zip(values, widths, strict=True)
            padded = [f"{first[0]:<{first[1]}}", *(f"{value:>{width}}" for value, width in rest)]
            return f"| {' | '.join(padded)} |"

        rule = [":" + "-" * (w - 1) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
        return [line(list(self.columns)), line(rule), *map(line, cells)]


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)


def hardware() -> str:
    """Processor, cores, memory, and the accelerator if there is one."""
    import torch

    parts = [_processor(), f"{psutil.cpu_count()} cores", f"{psutil.virtual_memory().total / GiB:.0f} GiB"]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Python and the packages that the figures depend on."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def command() -> str:
    """What was typed, from the repository's root."""
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def say(text: str) -> None:
    """Progress, beside the report."""
    print(text, file=sys.stderr, flush=True)
