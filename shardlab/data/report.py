"""What became of the data: for the start of a run, its summary, and `data inspect`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.data.records import CorpusReport, Problem


@dataclass(frozen=True)
class DataReport:
    """Counts over training and evaluation data.

    `records` read became `documents`, of which `mended` had something replaced. `problems` counts the bad ones by
    kind and `places` has the first of each. `masked_rows` are documents that are in no row because nothing of them can
    be learned within the sequence length; `truncated_documents` are cut there, by `truncated_tokens` in all.
    """

    records: int
    documents: int
    mended: int
    problems: Mapping[str, int]
    places: Mapping[str, Sequence[str]]
    masked_rows: int
    truncated_documents: int
    truncated_tokens: int

    @classmethod
    def of(cls, corpora: Sequence[CorpusReport], rows: Sequence[Any]) -> "DataReport":
        """The sum over `corpora`, and over those of `rows` that leave documents out."""
        problems: dict[str, int] = {}
        places: dict[str, tuple[str, ...]] = {}
        for report in corpora:
            for name, number in report.problems.items():
                problems[name] = problems.get(name, 0) + number
                places[name] = places.get(name, ()) + tuple(report.places[name])
        return cls(
            records=sum(report.records for report in corpora),
            documents=sum(report.documents for report in corpora),
            mended=sum(report.mended for report in corpora),
            problems=problems,
            places=places,
            masked_rows=sum(getattr(part, "masked_documents", 0) for part in rows),
            truncated_documents=sum(getattr(part, "truncated_documents", 0) for part in rows),
            truncated_tokens=sum(getattr(part, "truncated_tokens", 0) for part in rows),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def lines(self, shown: int = 3) -> list[str]:
        """For people: nothing where nothing was left out, mended or cut. `shown` places of each problem."""
        lines = []
        problems = [name for name in self.problems if name != Problem.EMPTY_FILE.value]
        if problems:
            lines.append(f"{self.documents:,} documents of {self.records:,} records; {self.mended:,} mended")
            lines += [self._problem(name, shown) for name in problems]
        if Problem.EMPTY_FILE.value in self.problems:
            lines.append(f"empty files left out: {self.problems[Problem.EMPTY_FILE.value]:,}")
        if self.masked_rows:
            lines.append(f"masked rows: {self.masked_rows:,} documents left out, nothing to learn before their cut")
        if self.truncated_documents:
            lines.append(f"cut: {self.truncated_documents:,} documents, {self.truncated_tokens:,} tokens")
        return lines

    def _problem(self, name: str, shown: int) -> str:
        places = self.places[name][:shown]
        more = ", …" if self.problems[name] > len(places) else ""
        return f"  {name}: {self.problems[name]:,}  {', '.join(places)}{more}"
