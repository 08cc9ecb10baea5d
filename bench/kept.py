"""Rows of a benchmark of many cells, kept in a file as they come: it can be run in parts, and go on where it ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import say


class CellError(Exception):
    """A cell's run failed; what it said."""


class Kept:
    """Rows by their cell's line. `file`, if there is one, has a JSON object a line; the last of a cell counts."""

    def __init__(self, file: Path | None):
        self._file = file
        self._rows: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []  # cells, each with the end of what its run said
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self._rows[row["cell"]] = row

    def row(self, cell: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The cell's row: from the file, or measured now and kept. None where its run fails; the others go on."""
        if cell in self._rows:
            return self._rows[cell]
        say(f"{cell} ...")
        try:
            row = {"cell": cell, **measure()}
        except CellError as error:
            say(str(error))
            self.failed.append(f"{cell}: {str(error).strip().splitlines()[-1]}")
            return None
        self._rows[cell] = row
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        return row
