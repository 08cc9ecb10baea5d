"""The documents of a source, in an order that never changes, read so that the text is never whole in memory.

All files are hashed when a corpus is opened. Its records are looked at once, before any work is done: what is wrong
with them is known, with file and line, before the first step. What that look found is kept beside the tokens, since it
follows from the hashes.
"""

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlab.data.cache import cached
from shardlab.data.forms import Sample, TextForm
from shardlab.data.records import CorpusReport, tally
from shardlab.data.sources import Reading, Source, TextFile, is_dataset, open_source
from shardlab.errors import UserError

PLAIN_TEXT = Reading(TextForm("text"), mend=False, max_record_bytes=1_000_000)
STDLIB_KEY = "data.source"
_FORMAT = 1  # raised when other records would be kept, or found bad
_NAMED_PLACES = 3  # of each problem, in an error
_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Sources in order, and how they are read. `key` is the recipe's key that named them.

    `digest` covers names, contents, order and reading, not where the files lie.
    """

    sources: tuple[Source, ...]
    reading: Reading
    key: str = "data.files"

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(f"{_FORMAT} {self.reading.key}\n".encode())
        for source in self.sources:
            digest.update(f"{source.name}\0{source.digest}\n".encode())
        return digest.hexdigest()

    def samples(self, order: Iterable[int] | None = None) -> Iterator[Sample]:
        """The documents; `order` is that of the sources."""
        for source in self.sources if order is None else (self.sources[index] for index in order):
            for outcome in source.outcomes(self.reading):
                if outcome.sample is not None:
                    yield outcome.sample

    def look(self) -> CorpusReport:
        """Read all records and count what is wrong with them; their places are named by the sources' paths."""
        return tally(
            (str(source.path), outcome) for source in self.sources for outcome in source.outcomes(self.reading)
        )


@dataclass(frozen=True)
class CheckedCorpus:
    """A corpus whose records were looked at."""

    corpus: Corpus
    report: CorpusReport

    @property
    def digest(self) -> str:
        return self.corpus.digest

    def samples(self, order: Iterable[int] | None = None) -> Iterator[Sample]:
        """The documents; `order` is that of the sources."""
        return self.corpus.samples(order)


def check_corpus(corpus: Corpus, cache: Path) -> CheckedCorpus:
    """Look at the records, unless the cache says what was found.

    Raises UserError if there is no text at all.
    """
    paths = "\0".join(str(source.path) for source in corpus.sources)  # they are in the report
    name = hashlib.sha256(f"{corpus.digest} {paths}".encode()).hexdigest()[:32]

    def build(directory: Path) -> None:
        (directory / "report.json").write_text(json.dumps(dataclasses.asdict(corpus.look())))

    def load(directory: Path) -> CorpusReport:
        values = json.loads((directory / "report.json").read_text())
        places = {name: tuple(shown) for name, shown in values.pop("places").items()}
        return CorpusReport(**values, places=places)

    report = cached(cache / "reports", name, build, load)
    if not report.documents:
        found = f": {report.counted(_NAMED_PLACES)}" if report.problems else ""
        raise UserError(f"{corpus.key}: no text in {_named(corpus.sources)}{found}")
    return CheckedCorpus(corpus, report)


def refusal(checked: CheckedCorpus) -> str | None:
    """Why a corpus is not trained on where bad records are errors, or None."""
    report = checked.report
    if not report.bad or checked.corpus.key == STDLIB_KEY:  # a few files of the library are there to be bad
        return None
    return (
        f"{checked.corpus.key}: {report.bad} of {report.records} records are bad: {report.counted(_NAMED_PLACES)}; "
        "mend them, or set data.on_bad_record to skip (leave them out) or replace (mend what can be mended)"
    )


def stdlib_corpus() -> Corpus:
    """The source of the running Python's standard library without its tests: 12 MB of text that is always there."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = tuple(open_source(path, path.relative_to(root).as_posix()) for path in sorted(_source_files(root)))
    if not sources:
        raise UserError(f"data.source 'stdlib': no source files under {root}")
    return Corpus(sources, PLAIN_TEXT, STDLIB_KEY)


def files_corpus(patterns: Sequence[str], reading: Reading = PLAIN_TEXT, *, key: str = "data.files") -> Corpus:
    """The files that the paths and globs of the recipe's `key` name; a glob's matches sorted, each file once.

    Raises UserError if a pattern matches nothing, or a directory that is no dataset, or a kind of file that `reading`
    has no use for.
    """
    sources = []
    for path in _matching(patterns, key):
        try:
            source = open_source(path, path.name)
        except OSError as error:
            raise UserError(f"{key}: cannot read {path}: {error.strerror}") from error
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        if isinstance(source, TextFile) and not isinstance(reading.form, TextForm):
            raise UserError(
                f"{key}: data.format needs records with {' and '.join(reading.form.columns)}, and {path} is read as "
                "plain text; give .jsonl, .parquet or a saved dataset"
            )
        sources.append(source)
    if not sources:
        raise UserError(f"{key}: no text in an empty list of files")
    return Corpus(tuple(sources), reading, key)


def _source_files(root: Path) -> Iterator[Path]:
    """Python files below `root`, without descending where there may be a hundred thousand others (site-packages)."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def _matching(patterns: Sequence[str], key: str) -> list[Path]:
    """Files and datasets in the patterns' order; the resolved path decides what is the same file."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        given = Path(pattern).expanduser()
        if given.is_dir() and not is_dataset(given):
            raise UserError(
                f"{key}: {pattern} is a directory and no saved dataset; name its files, for example "
                f"{pattern.rstrip('/')}/*.txt"
            )
        matches = [given] if given.exists() else [Path(name) for name in glob.glob(str(given), recursive=True)]
        files = sorted(path for path in matches if path.is_file() or (path.is_dir() and is_dataset(path)))
        if not files:
            what = "matches no file" if glob.has_magic(pattern) else "does not exist"
            raise UserError(f"{key}: {pattern} {what} (looked from {Path.cwd()})")
        for path in files:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _named(sources: Sequence[Source]) -> str:
    names = [str(source.path) for source in sources[:_NAMED_PLACES]]
    return ", ".join(names) + (", …" if len(sources) > len(names) else "")
