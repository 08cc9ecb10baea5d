"""What can be wrong with a record, and what is done about it.

A record is a line of JSONL, a row of Parquet or of a dataset, or a whole text file. Each is looked at before any work
is done, so that a bad one ends no run hours in; it is counted once, under the first thing wrong with it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SHOWN_PLACES = 20  # of each problem, kept in a report
BOM = "\ufeff"
_SURROGATES = re.compile("[\ud800-\udfff]")


class Problem(str, Enum):
    """The kinds of bad records, in the words that people see."""

    EMPTY = "empty"
    BLANK = "whitespace only"
    EMPTY_FILE = "empty file"  # left out whatever the policy: the `__init__.py` of a source tree
    NOT_UTF8 = "not UTF-8"
    NUL = "NUL"
    BOM = "BOM"
    TOO_LONG = "too long"
    TRUNCATED = "truncated"
    INVALID_JSON = "invalid JSON"
    MISSING_FIELD = "missing field"
    WRONG_TYPE = "wrong type"
    TEMPLATE = "chat template"


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a record."""

    problem: Problem
    detail: str = ""


class BadRecord(Exception):
    """A record that is left out."""

    def __init__(self, problem: Problem, detail: str = "") -> None:
        super().__init__(problem.value, detail)
        self.fault = Fault(problem, detail)


@dataclass
class Check:
    """One record under examination. With `mend`, bytes that are not UTF-8 become U+FFFD, NULs and BOMs go away, and
    `found` is the first such thing; all else, and everything without `mend`, raises BadRecord."""

    mend: bool
    max_bytes: int
    found: Fault | None = None

    def fault(self, problem: Problem, detail: str = "") -> None:
        """Something is wrong that can be mended."""
        if not self.mend:
            raise BadRecord(problem, detail)
        self.found = self.found or Fault(problem, detail)

    def decoded(self, raw: bytes) -> str:
        """The text of `raw`."""
        if raw.startswith(BOM.encode()):
            self.fault(Problem.BOM)
            raw = raw[len(BOM.encode()) :]
        if b"\0" in raw:
            self.fault(Problem.NUL, f"byte {raw.index(0)}")
            raw = raw.replace(b"\0", b"")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fault(Problem.NOT_UTF8, f"{error.reason} at byte {error.start}")
            return raw.decode(errors="replace")

    def clean(self, value: str | bytes) -> str:
        """A field's text, which may have nothing in it."""
        if len(value) > self.max_bytes:
            raise BadRecord(Problem.TOO_LONG, f"over {self.max_bytes:,} bytes")
        text = self.decoded(value) if isinstance(value, bytes) else value
        if text.startswith(BOM):
            self.fault(Problem.BOM)
            text = text.lstrip(BOM)
        if "\0" in text:
            self.fault(Problem.NUL, f"character {text.index(chr(0))}")
            text = text.replace("\0", "")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
            self.fault(Problem.NOT_UTF8, f"lone surrogate at character {error.start}")
            text = _SURROGATES.sub("\ufffd", text)
        return text

    def text(self, fields: Mapping[str, Any], column: str) -> str:
        """The text in `column`, which has something in it."""
        value = required(fields, column)
        if not isinstance(value, str | bytes):
            raise BadRecord(Problem.WRONG_TYPE, f"{column!r} is {kind(value)}, not text")
        text = self.clean(value)
        if not text:
            raise BadRecord(Problem.EMPTY, f"{column!r}")
        if text.isspace():
            raise BadRecord(Problem.BLANK, f"{column!r}")
        return text


def required(fields: Mapping[str, Any], column: str) -> Any:
    """What is in `column`."""
    value = fields.get(column)
    if value is None:
        others = ", ".join(repr(name) for name in list(fields)[:5] if name != column)
        what = "is null" if column in fields else "is missing"
        raise BadRecord(Problem.MISSING_FIELD, f"{column!r} {what}" + (f"; it has {others}" if others else ""))
    return value


def kind(value: object) -> str:
    """A value's type, in words."""
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), type(value).__name__)


@dataclass(frozen=True)
class Outcome:
    """A record looked at: what it is as a sample, if it is kept, and what is or was wrong with it.

    `number` is its line or row, counted from 1; of a text file the line of the fault.
    """

    number: int
    sample: Any  # a forms.Sample, or None
    fault: Fault | None


@dataclass(frozen=True)
class CorpusReport:
    """What a corpus is made of. `places` has the first few of each problem, as "file:line (what)".

    `mended` records are among the `documents`; `records` are all that were read.
    """

    records: int
    documents: int
    characters: int
    mended: int
    problems: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """Records that the policy is about: all with a problem, but not empty text files."""
        return sum(self.problems.values()) - self.problems.get(Problem.EMPTY_FILE.value, 0)

    def counted(self, shown: int) -> str:
        """Counts per problem, with the first `shown` places of each."""
        return "; ".join(f"{count} {name}{self._places(name, count, shown)}" for name, count in self.problems.items())

    def _places(self, name: str, count: int, shown: int) -> str:
        places = self.places.get(name, ())[:shown]
        if not places:
            return ""
        return f" ({', '.join(places)}{', …' if count > len(places) else ''})"


def tally(outcomes: Iterable[tuple[str, Outcome]]) -> CorpusReport:
    """Count outcomes, each with the name of its file."""
    records = documents = characters = mended = 0
    problems: dict[str, int] = {}
    places: dict[str, list[str]] = {}
    for file, outcome in outcomes:
        records += 1
        if outcome.sample is not None:
            documents += 1
            characters += outcome.sample.characters
            mended += outcome.fault is not None
        if outcome.fault is not None:
            name = outcome.fault.problem.value
            problems[name] = problems.get(name, 0) + 1
            shown = places.setdefault(name, [])
            if len(shown) < SHOWN_PLACES:
                detail = f" {outcome.fault.detail}" if outcome.fault.detail else ""
                shown.append(f"{file}:{outcome.number}{detail}")
    ordered = [problem.value for problem in Problem if problem.value in problems]
    return CorpusReport(
        records,
        documents,
        characters,
        mended,
        {name: problems[name] for name in ordered},
        {name: tuple(places[name]) for name in ordered},
    )
