"""What the doctor says of one thing."""

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]
_MARKS: dict[Status, str] = {"ok": "✓", "warning": "!", "failed": "✗"}


@dataclass(frozen=True)
class Check:
    """One check: what was found, and what to do where that is not well. A warning is no failure."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def line(self, plain: bool = False) -> str:
        """One line for people. `plain`: words instead of marks, for an output that can't show them."""
        mark = {"ok": "ok  ", "warning": "warn", "failed": "FAIL"}[self.status] if plain else _MARKS[self.status]
        return f"{mark} {self.name}: {self.found}" + (f"; {self.fix}" if self.fix else "")

    def as_json(self) -> dict[str, str]:
        """For a script."""
        return asdict(self)
