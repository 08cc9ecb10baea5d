"""Saving: every rank writes its share beside, all agree, one rename makes it a checkpoint.

1. Each rank says what it holds; replicas are shared out. The first rank checks the space and makes a hidden directory.
2. Each rank writes and syncs its own files. A failure on any rank is one on all.
3. The first rank writes the manifest, syncs, and renames the directory to `step-00000100`.

Killed at any moment, there is the old state or the new one, and perhaps a hidden directory that the next save removes.
One process is the same with one rank.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import JsonValue
from torch import Tensor

from shardlab.checkpoint.layout import FilePlan, Part, assign, header, parts_of, plan_files
from shardlab.checkpoint.listing import checkpoints, clean, delete_older, directory_name, hidden_name
from shardlab.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    DamagedError,
    FileEntry,
    Manifest,
    OptimizerEntry,
    Piece,
    TensorEntry,
    as_json,
    faults,
)
from shardlab.checkpoint.ranks import Agreement, Alone, Ranks
from shardlab.checkpoint.storage import LocalStorage, Storage, spelled_bytes
from shardlab.checkpoint.verification import examine
from shardlab.checkpoint.write import Written, write_files
from shardlab.errors import UserError
from shardlab.state.fragment import Fragment, OptimizerState

FILE_BYTES = 1024**3
MANIFEST_SHARE = 1 << 20  # bytes reckoned for the manifest and directory entries when space is checked

Fragments = Callable[[], Iterable[Fragment]]
Course = Generator[Callable[[], Any], list[Any], Path]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds beside the fragments, as the first rank has it. Tuples in it become lists."""

    step: int
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of tied tensors -> the canonical one
    schedule: Mapping[str, Any] = field(default_factory=dict)
    cursor: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # torch's and Python's are added
    attachments: Mapping[str, bytes] = field(default_factory=dict)  # small files by name: config.json, tokenizer.json
    parent: str | None = None
    evaluation: float | None = None  # a loss: the checkpoint with the lowest is kept besides the newest


class Saver:
    """Saves into `root`, the run's checkpoints/, of which it keeps the `keep` newest and the best by evaluation."""

    def __init__(
        self,
        root: Path,
        ranks: Ranks | None = None,
        *,
        keep: int = 2,
        file_bytes: int = FILE_BYTES,
        storage: Storage | None = None,
    ):
        if keep < 1:
            raise UserError(f"checkpoint.keep is {keep}; at least the newest one is kept")
        self.root = root
        self.ranks = ranks or Alone()
        self.keep = keep
        self.file_bytes = file_bytes
        self.storage = storage or LocalStorage()

    def save(self, contents: Contents, fragments: Fragments) -> Path:
        """Save now and return the checkpoint's directory; then delete older ones. Collective.

        `fragments` is called twice (what there is; the values) and must yield the same each time. Raises UserError
        where the disk is full or can't be written, on every rank: the checkpoints before it stay as they are.
        """
        draft = self.begin(contents, fragments)
        return run_course(self.course(draft, parts_of(fragments(), self.file_bytes)), self.ranks)

    def trial(self) -> None:
        """Before training: write, sync, rename and read back a small file on each rank. Collective.

        Raises UserError if checkpoints can't be written there, or a rank does not see what another wrote.
        """
        name = self._agreed_directory(directory_name(0))
        directory = self.root / name
        with self.abandoned_on_error(directory), Agreement[None](self.ranks), self._mendable("a trial save"):
            self._write_file(directory / f"rank-{self.ranks.rank:05d}", b"trial")
        with self.abandoned_on_error(directory), Agreement[None](self.ranks), self._mendable("a trial save"):
            if self.ranks.rank == 0:
                self._require_visible(directory, {f"rank-{rank:05d}": 5 for rank in range(self.ranks.world_size)})
                moved = self.root / hidden_name(directory_name(0), "deleted")
                self.storage.rename(directory, moved)
                self.storage.sync_directory(self.root)
                self.storage.delete(moved)

    def begin(self, contents: Contents, fragments: Fragments) -> Draft:
        """The first step: who writes what, and where. Collective; reads no values."""
        self.ranks.meet(f"save (step {contents.step})")
        with Agreement[list[Part]](self.ranks) as held:
            held.value = [part for part, _ in parts_of(fragments(), self.file_bytes)]
        shares = assign(held.values)
        plans = plan_files(shares[self.ranks.rank], self.ranks.rank, self.file_bytes)
        attached = sum(len(content) for content in contents.attachments.values())
        needed = MANIFEST_SHARE + attached + sum(part.bytes for parts in shares for part in parts)
        name = self._agreed_directory(directory_name(contents.step), needed)
        return Draft(contents, self.root / name, self.root / directory_name(contents.step), plans, needed)

    def course(self, draft: Draft, parts: Iterable[tuple[Part, Tensor]]) -> Course:
        """The steps after the first: each job is one rank's work, in any thread; what all ranks' came to is sent in.

        Returns the checkpoint's directory. Nothing in a job is collective.
        """
        with self.abandoned_on_error(draft.partial):
            written = yield partial(self._write, draft, parts)
            yield partial(self._publish, draft, written)
        told = yield lambda: len(checkpoints(self.root, self.storage)) > self.keep
        if told[0]:
            share = (self.ranks.rank, self.ranks.world_size)
            found = yield partial(examine, draft.final, self.storage, *share)
            for fault in (fault for faults in found for fault in faults):
                raise DamagedError(f"what was just saved can't be read back, so nothing older is deleted: {fault}")
            yield partial(self._delete_older, draft.contents.step)
        return draft.final

    def _write(self, draft: Draft, parts: Iterable[tuple[Part, Tensor]]) -> list[Written]:
        with self._mendable(f"the checkpoint {draft.final.name}", draft):
            return write_files(draft.partial, draft.plans, parts, self.storage)

    def _publish(self, draft: Draft, written: list[list[Written]]) -> None:
        """The first rank makes it a checkpoint."""
        if self.ranks.rank != 0:
            return
        manifest = manifest_of(draft.contents, [file for files in written for file in files])
        for fault in faults(manifest):
            raise RuntimeError(f"the fragments of step {draft.contents.step} are not the training state: {fault}")
        self._require_visible(draft.partial, {file.name: file.bytes for file in manifest.files})
        with self._mendable(f"the checkpoint {draft.final.name}", draft):
            for name, content in draft.contents.attachments.items():
                self._write_file(draft.partial / name, content)
            self._write_file(draft.partial / MANIFEST, manifest.dump())
            self.storage.sync_directory(draft.partial)
            replaced = None
            if draft.final.name in self.storage.names(self.root):  # of an earlier life of this run
                replaced = self.root / hidden_name(draft.final.name, "replaced")
                self.storage.rename(draft.final, replaced)  # `clean` puts it back if this process dies here
            self.storage.rename(draft.partial, draft.final)
            self.storage.sync_directory(self.root)
            if replaced is not None:
                self.storage.delete(replaced)

    def _delete_older(self, step: int) -> None:
        if self.ranks.rank == 0:
            delete_older(self.root, step, self.keep, self.storage)

    @contextmanager
    def abandoned_on_error(self, directory: Path) -> Iterator[None]:
        """Remove the hidden directory when what is inside fails; the error goes on."""
        try:
            yield
        except Exception:
            if self.ranks.rank == 0:
                self.storage.delete(directory)
            raise

    def _agreed_directory(self, name: str, needed_bytes: int | None = None) -> str:
        """A new hidden directory, made by the first rank; its name, on every rank."""
        with Agreement[str](self.ranks) as agreed:
            agreed.value = hidden_name(name, "partial")
            if self.ranks.rank == 0:
                with self._mendable("a checkpoint"):
                    clean(self.root, self.storage)
                    if needed_bytes is not None:
                        self._require_space(needed_bytes, f"the checkpoint {name}")
                    fresh = not self.storage.is_directory(self.root)
                    self.storage.make_directory(self.root / agreed.value)
                    if fresh:
                        self.storage.sync_directory(self.root.parent)
        return agreed.values[0]

    def _write_file(self, path: Path, content: bytes) -> None:
        file = self.storage.create(path)
        try:
            file.write(content)
            file.sync()
        finally:
            file.close()

    def _require_visible(self, directory: Path, sizes: Mapping[str, int]) -> None:
        """Whether this process sees the files of all ranks."""
        seen = set(self.storage.names(directory))
        for name, size in sizes.items():
            if name not in seen:
                raise UserError(
                    f"{directory / name} was written by another rank and is not seen here: "
                    f"all hosts must share {self.root}"
                )
            file = self.storage.open(directory / name)
            file.close()
            if file.size != size:
                raise RuntimeError(f"{directory / name} has {file.size} bytes where {size} were written")

    def _require_space(self, needed_bytes: int, what: str) -> None:
        free = self.storage.free_bytes(self.root)
        if free < needed_bytes:
            raise UserError(self._full(what, needed_bytes, free))

    def _written_bytes(self, directory: Path) -> int:
        total = 0
        for name in self.storage.names(directory):
            file = self.storage.open(directory / name)
            file.close()
            total += file.size
        return total

    def _full(self, what: str, needed_bytes: int | None, free_bytes: int) -> str:
        needs = f" needs {spelled_bytes(needed_bytes)}," if needed_bytes is not None else ":"
        have = checkpoints(self.root, self.storage)
        rest = f"; the newest checkpoint is still {have[-1].path.name}" if have else ""
        has = f"{self.root} has {spelled_bytes(free_bytes)} free"
        return f"disk full: {what}{needs} {has}: make room there, or set another --output{rest}"

    @contextmanager
    def _mendable(self, what: str, draft: Draft | None = None) -> Iterator[None]:
        """Operating-system errors that a user can mend, as UserError."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = self.storage.free_bytes(self.root)
                needed = None
                if draft is not None:
                    free += self._written_bytes(draft.partial)  # they are freed at once
                    needed = draft.needed_bytes
                raise UserError(self._full(what, needed, free)) from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
                raise UserError(f"{what} can't be written: {error.filename or self.root}: {error.strerror}") from error
            raise


def run_course(course: Course, ranks: Ranks) -> Path:
    """Do the steps of a save here and now. Collective."""
    results: list[Any] | None = None
    while True:
        try:
            job = next(course) if results is None else course.send(results)
        except StopIteration as end:
            path: Path = end.value
            return path
        try:
            with Agreement[Any](ranks) as agreed:
                agreed.value = job()
        except Exception as error:
            course.throw(error)
            raise
        results = agreed.values


@dataclass(frozen=True)
class Draft:
    """A save under way."""

    contents: Contents
    partial: Path
    final: Path
    plans: list[FilePlan]  # this rank's
    needed_bytes: int  # of all ranks


def manifest_of(contents: Contents, written: list[Written]) -> Manifest:
    """The manifest of `written`, the files of all ranks."""
    pieces: dict[tuple[str, str], tuple[Part, list[Piece]]] = {}
    for number, file in enumerate(written):
        begin = len(header(file.parts))
        for part in file.parts:
            piece = Piece(number, begin, part.box.offsets, part.box.lengths)
            pieces.setdefault((part.name, part.kind), (part, []))[1].append(piece)
            begin += part.bytes
    tensors = tuple(
        TensorEntry(name=part.name, kind=part.kind, shape=part.shape, dtype=part.dtype, pieces=tuple(places))
        for part, places in pieces.values()
    )
    attachments = tuple(
        FileEntry(name=name, bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
        for name, content in contents.attachments.items()
    )
    return Manifest(
        version=VERSION,
        step=contents.step,
        files=tuple(file.entry for file in written),
        attachments=attachments,
        tensors=tensors,
        aliases=dict(contents.aliases),
        optimizer=OptimizerEntry.of(contents.optimizer),
        schedule=_section("schedule", contents.schedule),
        cursor=_section("cursor", contents.cursor),
        recipe=_section("recipe", contents.recipe),
        plan=_section("plan", contents.plan),
        versions={"torch": torch.__version__, "python": platform.python_version(), **contents.versions},
        parent=contents.parent,
        evaluation=contents.evaluation,
    )


def _section(name: str, values: Mapping[str, Any]) -> dict[str, JsonValue]:
    return {key: as_json(f"{name}.{key}", value) for key, value in values.items()}
