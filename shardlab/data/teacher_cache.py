"""What a teacher says of a corpus's rows, on the disk: each position's likeliest tokens and the share of all others.

A row is known by its number among the packed rows, and what the number means by the cache's identity: text, tokenizer,
split, length and packing. So any order, world size or micro-batch reads the same cache, and a run that needs more rows
adds them. A shard holds some rows, in no particular order; its name ends in its hash. It is there whole or not at all.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from shardlab.data.order import rows_at
from shardlab.data.packing import FILLER
from shardlab.data.window import TAUGHT_IDS, TAUGHT_REST, TAUGHT_SHARES
from shardlab.data.windows import Rows
from shardlab.errors import UserError

SHARD_TOKENS = 16384  # of work lost by a kill at most, and of hidden states held at a time while it is written
IDENTITY = "cache.json"
_LOCK = "cache.lock"
_SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_READ_BYTES = 1 << 20
_LEAST = -1e4  # a log share; fp16 has -infinity, whose product with a share of 0 is no number


@dataclass(frozen=True)
class CacheIdentity:
    """What a cache is of. Shares are softened by `temperature`, over the first `columns` entries of the vocabulary."""

    teacher: str
    text: str
    rows: int
    sequence_length: int
    packing: bool
    columns: int
    top_k: int
    temperature: float

    @property
    def token_bytes(self) -> int:
        """On the disk."""
        return self.top_k * (_id_type(self.columns).itemsize + 2) + 4

    @property
    def shard_rows(self) -> int:
        """Rows that are written together."""
        return max(1, SHARD_TOKENS // self.sequence_length)


_SAID = {
    "teacher": "another teacher (its weights or config differ)",
    "text": "another text, tokenizer or split",
    "rows": "another number of rows",
    "sequence_length": "data.sequence_length",
    "packing": "data.packing",
    "columns": "entries of the vocabulary",
    "top_k": "distill.cache_top_k",
    "temperature": "distill.temperature",
}


@dataclass(frozen=True)
class Said:
    """What a teacher says of rows: `ids` and `shares` (rows, sequence, k), `rest` (rows, sequence); logs of shares."""

    ids: NDArray[np.integer]
    shares: NDArray[np.float16]
    rest: NDArray[np.float32]


class TeacherCache:
    """The cache in a directory. Raises UserError for a directory that holds something else, or another's cache."""

    def __init__(self, directory: Path, identity: CacheIdentity):
        self.directory = directory
        self.identity = identity
        self._files: list[Path] = []
        self._file = np.full(identity.rows, -1, dtype=np.int32)  # of each row: in which file, and where
        self._slot = np.zeros(identity.rows, dtype=np.int32)
        self._check()

    def _check(self) -> None:
        file = self.directory / IDENTITY
        if not file.exists():
            if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
                raise UserError(f"distill.cache: {self.directory} is no cache, and not empty: give another directory")
            return
        try:
            there = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"distill.cache: {file} can't be read: {error}") from error
        for key, value in asdict(self.identity).items():
            if there.get(key) != value:
                said = _SAID[key]
                change = "" if key in ("teacher", "text") else f": {there.get(key)} there, {value} here"
                raise UserError(
                    f"distill.cache: {self.directory} was written for {said}{change}; give another directory, or "
                    "remove it"
                )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The one writer of this directory, with what a killed one left undone removed. Raises UserError beside one."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / _LOCK).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"distill.cache: another run is writing {self.directory}: wait for it") from None
                for left in self.directory.glob(f"*{_PARTIAL}"):
                    left.unlink()
                if not (self.directory / IDENTITY).exists():
                    self._write(IDENTITY, json.dumps(asdict(self.identity), indent=1).encode())
                yield
        except OSError as error:
            raise UserError(f"distill.cache: {self.directory} can't be written: {error.strerror}") from error

    def files(self) -> list[Path]:
        """The shards, whole or damaged."""
        return sorted(self.directory.glob(f"*{_SUFFIX}"))

    def look(self, without: Sequence[Path] = ()) -> None:
        """Find the rows that are there, in shards other than those."""
        self._files = [file for file in self.files() if file not in without]
        self._file[:] = -1
        for number, file in enumerate(self._files):
            with safe_open(file, "numpy") as shard:
                rows = shard.get_tensor("rows")
            self._file[rows], self._slot[rows] = number, np.arange(len(rows))

    def missing(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of `rows` that `look` did not find."""
        return rows[self._file[rows] < 0]

    def put(self, rows: NDArray[np.int64], said: Said) -> Path:
        """Write a shard: under its own name when it is whole and on the disk."""
        data = save(
            {
                "rows": rows,
                "ids": said.ids.astype(_id_type(self.identity.columns)),
                "shares": np.maximum(said.shares, np.float16(_LEAST)),
                "rest": np.maximum(said.rest, np.float32(_LEAST)),
            }
        )
        name = f"{int(rows[0]):09d}-{xxhash.xxh3_128_hexdigest(data)}{_SUFFIX}"
        try:
            return self._write(name, data)
        except OSError as error:
            raise UserError(f"distill.cache: {self.directory} can't be written: {error.strerror}") from error

    def _write(self, name: str, data: bytes) -> Path:
        partial = self.directory / f"{name}{_PARTIAL}"
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.directory / name)
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return self.directory / name

    def read(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """What a micro-batch of these rows brings (`data.window.TAUGHT`); zeros for a filler row, -1.

        Raises KeyError for a row that is not there.
        """
        rows, identity = np.asarray(indices, dtype=np.int64), self.identity
        shape = (len(rows), identity.sequence_length, identity.top_k)
        ids, shares = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float16)
        rest = np.zeros(shape[:2], dtype=np.float32)
        for at, row in enumerate(rows.tolist()):
            if row == FILLER:
                continue
            number, slot = int(self._file[row]), int(self._slot[row])
            if number < 0:
                raise KeyError(f"row {row} is not in {self.directory}")
            with safe_open(self._files[number], "numpy") as shard:
                ids[at] = shard.get_slice("ids")[slot : slot + 1][0]
                shares[at] = shard.get_slice("shares")[slot : slot + 1][0]
                rest[at] = shard.get_slice("rest")[slot : slot + 1][0]
        return {
            TAUGHT_IDS: torch.from_numpy(ids),
            TAUGHT_SHARES: torch.from_numpy(shares.view(np.int16)),
            TAUGHT_REST: torch.from_numpy(rest.view(np.int32)),
        }


class TaughtRows:
    """Rows, with what the teacher says of them beside."""

    def __init__(self, rows: Rows, cache: TeacherCache):
        self._rows = rows
        self._cache = cache

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """See `Rows`."""
        return {**self._rows.batch(indices), **self._cache.read(indices)}

    def valid_tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        """See `Rows`."""
        return self._rows.valid_tokens(indices)


def rows_of_run(samples: int, rows: int, seed: int) -> NDArray[np.int64]:
    """The distinct rows at the first `samples` positions of a run, in ascending order."""
    if samples >= rows:
        return np.arange(rows, dtype=np.int64)
    return np.unique(rows_at(np.arange(samples, dtype=np.int64), rows, seed))


def damaged(files: Iterable[Path]) -> list[Path]:
    """Shards that are not what was written."""
    return [file for file in files if file.stem.rpartition("-")[2] != _digest(file)]


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as source:
        while block := source.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def directory_digest(directory: Path) -> str:
    """Of a model directory's weights and config: what its scores follow from."""
    files = [directory / "config.json", *sorted(directory.glob(f"*{_SUFFIX}"))]
    return xxhash.xxh3_128_hexdigest(" ".join(f"{file.name} {_digest(file)}" for file in files).encode())


def _id_type(columns: int) -> np.dtype:
    return np.dtype(np.uint16 if columns <= 1 << 16 else np.int32)
