"""What a linter says of a file."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeGuard

Severity = Literal["error", "warning", "note"]
AUTO = "auto"


@dataclass(frozen=True)
class Finding:
    """One thing about one key: what is wrong with it (or worth knowing), and what to do.

    An error stops the job, or has it compute something else than the file says; a warning is a default or a cost that
    few would have chosen; a note is for information.
    """

    severity: Severity
    file: str
    key: str  # dotted path; empty for the file as a whole
    message: str
    fix: str = ""

    def __str__(self) -> str:
        """One line."""
        where = f"{self.file}: {self.key}" if self.key else self.file
        return f"{self.severity}: {where}: {self.message}" + (f"; {self.fix}" if self.fix else "")

    def as_json(self) -> dict[str, str]:
        """For a script."""
        return asdict(self)


def described(value: Any) -> str:
    """A value as it stands in the file, with its type where two are easily confused."""
    return f"the string {json.dumps(value)}" if isinstance(value, str) else json.dumps(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def section(values: Any, *path: str) -> dict[str, Any]:
    """The section at `path`, empty where there is none."""
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def enabled(values: dict[str, Any], name: str) -> bool:
    """Whether the section `name` is switched on, as DeepSpeed reads it."""
    value = section(values, name).get("enabled", False)
    return value.lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)


def stage_of(values: dict[str, Any]) -> int:
    """The ZeRO stage, 0 where none can be made out."""
    stage = section(values, "zero_optimization").get("stage", 0)
    try:
        return int(stage)
    except (TypeError, ValueError):
        return 0
