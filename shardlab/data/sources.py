"""Files of each kind, read record by record in bounded memory: text, JSONL, Parquet, a dataset saved by `datasets`.

The suffix says which. What is read can be read again: reading is a pure function of the bytes and of how they are to
be read, so that nothing has to be remembered between the look at the records and their use.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardlab.data.forms import Form
from shardlab.data.plain_text import FileText, find_fault
from shardlab.data.records import BadRecord, Check, Outcome, Problem
from shardlab.errors import UserError

_READ_BYTES = 1 << 20
_ROWS_AT_ONCE = 64  # a row may be a megabyte
_CONVERT = "convert it to .jsonl or .parquet (or name it .txt to learn it as it stands)"
UNREAD_SUFFIXES = {
    ".json": "write one object per line and name it .jsonl",
    ".csv": _CONVERT,
    ".tsv": _CONVERT,
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), "unpack it"),
    **dict.fromkeys((".npy", ".npz", ".bin", ".pt", ".safetensors", ".pkl", ".pdf", ".docx"), "give text or records"),
}


@dataclass(frozen=True)
class Reading:
    """How records are read: as what, whether the bad ones are mended, and how long one may be."""

    form: Form
    mend: bool
    max_record_bytes: int

    @property
    def key(self) -> str:
        """Tells readings apart that give other samples."""
        return f"{self.form.key} {self.mend} {self.max_record_bytes}"

    def check(self) -> Check:
        """For one record."""
        return Check(self.mend, self.max_record_bytes)


@dataclass(frozen=True)
class Source(ABC):
    """A file, or a dataset's directory. `name` is the same wherever it lies; `digest` is the SHA-256 of its bytes."""

    path: Path
    name: str
    digest: str

    @abstractmethod
    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        """Its records, looked at, in order."""


@dataclass(frozen=True)
class TextFile(Source):
    """One document, of any length."""

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        """See `Source`: one."""
        found = find_fault(self.path, mend=reading.mend)
        if found.blank:
            yield Outcome(1, None, BadRecord(Problem.EMPTY_FILE).fault)
            return
        kept = found.fault is None or reading.mend
        sample = FileText(self.path, found.characters, reading.mend) if kept else None
        yield Outcome(found.line, sample, found.fault)


@dataclass(frozen=True)
class RecordSource(Source):
    """Many records, each with named fields."""

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        """See `Source`."""
        for number, record in enumerate(self._records(reading), start=1):
            check = reading.check()
            try:
                sample = reading.form.sample(self._fields(record, check), check)
            except BadRecord as bad:
                yield Outcome(number, None, bad.fault)
            else:
                yield Outcome(number, sample, check.found)

    @abstractmethod
    def _records(self, reading: Reading) -> Iterator[Any]:
        """The records as they stand."""

    @abstractmethod
    def _fields(self, record: Any, check: Check) -> Mapping[str, Any]:
        """What is in a record's fields; text may still be bytes. Raises BadRecord."""


@dataclass(frozen=True)
class _Line:
    """A line without its end; `whole` if it had one, `cut` if it goes on for longer than a record may."""

    content: bytes
    whole: bool
    cut: bool = False


@dataclass(frozen=True)
class JsonLines(RecordSource):
    """A JSON object per line."""

    def _records(self, reading: Reading) -> Iterator[_Line]:
        most = reading.max_record_bytes + 2  # and the line's end
        with self.path.open("rb") as file:
            while line := file.readline(most):
                content = line.rstrip(b"\r\n")
                whole = line.endswith(b"\n")
                if len(content) > reading.max_record_bytes:
                    while not whole and (line := file.readline(_READ_BYTES)):
                        whole = line.endswith(b"\n")
                    yield _Line(b"", whole, cut=True)
                else:
                    yield _Line(content, whole)

    def _fields(self, record: _Line, check: Check) -> Mapping[str, Any]:
        if record.cut:
            raise BadRecord(Problem.TOO_LONG, f"over {check.max_bytes:,} bytes")
        text = check.decoded(record.content)
        if not text or text.isspace():
            raise BadRecord(Problem.BLANK if text else Problem.EMPTY)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            problem = Problem.INVALID_JSON if record.whole else Problem.TRUNCATED
            raise BadRecord(problem, getattr(error, "msg", "")) from error
        if not isinstance(fields, dict):
            raise BadRecord(Problem.INVALID_JSON, "not an object")
        return fields


@dataclass(frozen=True)
class TableSource(RecordSource):
    """Rows of Arrow tables."""

    def _records(self, reading: Reading) -> Iterator[Mapping[str, Any]]:
        wanted = reading.form.columns
        columns = self._columns()
        for column in wanted:
            if column not in columns:
                raise UserError(
                    f"{self.path} has no column {column!r} but {', '.join(columns)}; data.columns says which to read"
                )
        for table in self._tables(list(wanted)):
            values = [_values(table.column(column)) for column in wanted]
            for row in range(table.num_rows):
                yield {column: value(row) for column, value in zip(wanted, values, strict=True)}

    def _fields(self, record: Mapping[str, Any], check: Check) -> Mapping[str, Any]:
        del check
        try:
            return {column: value() for column, value in record.items()}
        except UnicodeDecodeError as error:  # nobody verifies the text inside a table
            raise BadRecord(Problem.NOT_UTF8, error.reason) from error

    @abstractmethod
    def _columns(self) -> list[str]:
        """All there are."""

    @abstractmethod
    def _tables(self, columns: list[str]) -> Iterator[Any]:
        """Tables, or record batches, of these columns, of a few rows each."""


def _values(column: Any) -> Any:
    """row -> a function that reads its value. Text comes as bytes: Arrow does not look whether it is UTF-8."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return lambda row: partial(_value, column, row)


def _value(column: Any, row: int) -> Any:
    return column[row].as_py()


@dataclass(frozen=True)
class ParquetFile(TableSource):
    """A Parquet file, read a few rows at a time."""

    def _columns(self) -> list[str]:
        with self._opened() as file:
            return list(file.schema_arrow.names)

    def _tables(self, columns: list[str]) -> Iterator[Any]:
        with self._opened() as file:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, use_threads=False)

    def _opened(self) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.path, buffer_size=_READ_BYTES, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise UserError(f"{self.path} is not a whole Parquet file: {error}") from error


@dataclass(frozen=True)
class SavedDataset(TableSource):
    """A directory written by `datasets.Dataset.save_to_disk`, or one of its .arrow files."""

    def _columns(self) -> list[str]:
        return list(self._loaded().column_names)

    def _tables(self, columns: list[str]) -> Iterator[Any]:
        yield from self._loaded().select_columns(columns).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)

    def _loaded(self) -> Any:
        import datasets

        try:
            if self.path.is_dir():
                return datasets.load_from_disk(str(self.path))
            return datasets.Dataset.from_file(str(self.path))
        except Exception as error:  # datasets lets through what Arrow, JSON and the file system raise
            raise UserError(f"{self.path} is not a dataset that `datasets` reads: {error}") from error


def open_source(path: Path, name: str) -> Source:
    """The file or directory as its suffix or content says, hashed.

    Raises UserError for kinds that are not read, OSError for a file that can't be.
    """
    if path.is_dir():
        return SavedDataset(path, name, _hashed(*_dataset_files(path)))
    suffix = path.suffix.lower()
    if suffix in UNREAD_SUFFIXES:
        raise UserError(f"{path}: {suffix} files are not read; {UNREAD_SUFFIXES[suffix]}")
    kinds: dict[str, type[Source]] = {
        ".jsonl": JsonLines,
        ".ndjson": JsonLines,
        ".parquet": ParquetFile,
        ".arrow": SavedDataset,
    }
    return kinds.get(suffix, TextFile)(path, name, _hashed(path))


def is_dataset(directory: Path) -> bool:
    """Whether a directory holds what `datasets` saves."""
    marks = ("state.json", "dataset_info.json", "dataset_dict.json")
    return any((directory / mark).is_file() for mark in marks) or any(directory.glob("*.arrow"))


def _dataset_files(directory: Path) -> list[Path]:
    splits = directory / "dataset_dict.json"
    if splits.is_file():
        names = ", ".join(json.loads(splits.read_text()).get("splits", ()))
        raise UserError(f"{directory} holds the splits {names}; name one of them, such as {directory}/train")
    if not (directory / "state.json").is_file():
        raise UserError(
            f"{directory} is not what Dataset.save_to_disk writes: it has no state.json; name its .arrow files"
        )
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _hashed(*files: Path) -> str:
    """SHA-256 of files one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
