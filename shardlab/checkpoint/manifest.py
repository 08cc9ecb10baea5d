"""The manifest: what a checkpoint holds and where, as JSON; and the checks that it passes before anything is believed.

Its first line carries the hash of all that follows, so a flipped bit in it is found like one in a file. Names of files
are plain names in the checkpoint's own directory: nothing in a manifest can point elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from shardlab.checkpoint.coverage import coverage_fault
from shardlab.checkpoint.layout import DTYPES, Part, header
from shardlab.errors import UserError
from shardlab.state.box import Box
from shardlab.state.fragment import OptimizerState
from shardlab.state.masks import MASKS

MANIFEST = "manifest.json"
VERSION = 1

_FIRST_LINE = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",\n')
# No .py: what a checkpoint brings is never code.
_ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(json|txt|model|jinja)")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")

Count = Annotated[int, Field(ge=0)]
Dims = Annotated[tuple[Count, ...], Field(max_length=32)]
Json = dict[str, JsonValue]


class DamagedError(UserError):
    """A checkpoint is not what it should be: the line says which, which file, and how."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Strict):
    """A file of the checkpoint: its size and the hash of its content (XXH3, 128 bits; `xxh128sum` prints the same)."""

    name: str
    bytes: Count
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Piece(NamedTuple):
    """Where a box of a tensor lies: `files[file]`, from the byte `begin` of it on, its elements in row-major order."""

    file: Count
    begin: Count
    offsets: Dims
    lengths: Dims


class TensorEntry(_Strict):
    """One tensor of training state: a name and a kind, and the pieces that make it up."""

    name: str
    kind: str
    shape: Dims
    dtype: str
    encoding: Literal["raw"] = "raw"
    pieces: tuple[Piece, ...]


class OptimizerEntry(_Strict):
    """`OptimizerState`, as JSON."""

    kinds: tuple[str, ...] = ()
    scalars: dict[str, dict[str, float]] = {}
    groups: tuple[Json, ...] = ()

    @classmethod
    def of(cls, state: OptimizerState) -> OptimizerEntry:
        """`state`, its options in JSON's types. Raises RuntimeError for an option that has none."""
        scalars = {name: {key: float(value) for key, value in kept.items()} for name, kept in state.scalars.items()}
        groups = tuple(
            {key: as_json(f"the optimizer's option {key}", value) for key, value in group.items()}
            for group in state.groups
        )
        return cls(kinds=tuple(state.kinds), scalars=scalars, groups=groups)

    def state(self) -> OptimizerState:
        """As it was; sequences come back as tuples."""
        groups = tuple({key: _tuples(value) for key, value in group.items()} for group in self.groups)
        return OptimizerState(self.kinds, self.scalars, groups)


class Manifest(_Strict):
    """Everything of a checkpoint but the tensors' values.

    `aliases`: other names of tied tensors -> the canonical one. `schedule`, `cursor`, `recipe`, `plan` are the
    caller's; `evaluation` is a loss by which the best is kept, `parent` the checkpoint that the run came from.
    `attachments` are small files that an exported model needs: its config, its tokenizer, its masks.
    """

    version: int
    step: Count
    files: tuple[FileEntry, ...]
    attachments: tuple[FileEntry, ...] = ()
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str] = {}
    optimizer: OptimizerEntry = OptimizerEntry()
    schedule: Json = {}
    cursor: Json = {}
    recipe: Json = {}
    plan: Json = {}
    versions: dict[str, str] = {}
    parent: str | None = None
    evaluation: float | None = None

    def dump(self) -> bytes:
        """The file's content."""
        rest = self.model_dump_json().encode()[1:]
        return b'{"xxh3_128":"%s",\n' % xxhash.xxh3_128_hexdigest(rest).encode() + rest

    def pieces_by_file(self) -> list[list[tuple[int, Part]]]:
        """(where it begins, what it is) of all that lies in each of `files`, in the order of its bytes."""
        found: list[list[tuple[int, Part]]] = [[] for _ in self.files]
        for entry in self.tensors:
            for piece in entry.pieces:
                part = Part(entry.name, entry.kind, entry.shape, entry.dtype, Box(piece.offsets, piece.lengths))
                found[piece.file].append((piece.begin, part))
        for pieces in found:
            pieces.sort(key=lambda pair: pair[0])
        return found


def parse(content: bytes, where: str) -> Manifest:
    """Read a manifest's content and check that it is whole and consistent.

    Raises DamagedError beginning with `where`; UserError for a version that this program does not know.
    """
    first = _FIRST_LINE.match(content)
    if first is None:
        raise DamagedError(f"{where}: not a manifest of a checkpoint")
    rest = content[first.end() :]
    if xxhash.xxh3_128_hexdigest(rest).encode() != first[1]:
        raise DamagedError(f"{where}: its content is not what its own hash says")
    try:
        manifest = Manifest.model_validate_json(b"{" + rest)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in problem["loc"])
        raise DamagedError(f"{where}: {place or 'content'}: {problem['msg']}") from error
    if manifest.version != VERSION:
        raise UserError(f"{where}: format version {manifest.version}; this program reads version {VERSION}")
    for fault in faults(manifest):
        raise DamagedError(f"{where}: {fault}")
    return manifest


def faults(manifest: Manifest) -> Iterator[str]:
    """What contradicts itself in a manifest; nothing is allocated by the sizes in it."""
    yield from _file_faults(manifest)
    names = set()
    for entry in manifest.tensors:
        label = f"{entry.name} ({entry.kind})"
        if (entry.name, entry.kind) in names:
            yield f"{label} is listed twice"
        names.add((entry.name, entry.kind))
        fault = _tensor_fault(manifest, entry)
        if fault is not None:
            yield f"{label}: {fault}"
    known = {name for name, _ in names}
    for alias, name in manifest.aliases.items():
        if name not in known or alias in known:
            yield f"{alias} is listed as another name of {name}, which it can't be"


def _file_faults(manifest: Manifest) -> Iterator[str]:
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            yield f"{file.name!r} is not a plain name of a file in the checkpoint's own directory"
    for file in manifest.attachments:
        if file.name == MANIFEST or not (_ATTACHMENT_NAME.fullmatch(file.name) or file.name == MASKS):
            yield f"{file.name!r} is not a name that an attachment may have"
    everything = [*manifest.files, *manifest.attachments]
    if len({file.name for file in everything}) < len(everything):
        yield "a file is listed twice"


def _tensor_fault(manifest: Manifest, entry: TensorEntry) -> str | None:
    if entry.dtype not in DTYPES:
        return f"dtype {entry.dtype!r} is not known"
    itemsize = DTYPES[entry.dtype].itemsize
    for piece in entry.pieces:
        if len(piece.offsets) != len(piece.lengths) or not all(piece.lengths):
            return f"a box at {piece.offsets} of {piece.lengths}"
        box = Box(piece.offsets, piece.lengths)
        if not box.fits(entry.shape):
            return f"a box at {piece.offsets} of {piece.lengths} is not inside its shape {entry.shape}"
        if piece.file >= len(manifest.files):
            return f"a box lies in file {piece.file} of {len(manifest.files)}"
        file = manifest.files[piece.file]
        if piece.begin + box.numel * itemsize > file.bytes:
            return f"a box lies beyond the end of {file.name}"
    return coverage_fault(entry.shape, entry.pieces)


def expected_header(file: FileEntry, pieces: list[tuple[int, Part]]) -> bytes:
    """What a file with these pieces must begin with; raises DamagedError where they don't lie one after another."""
    first = header(part for _, part in pieces)
    at = len(first)
    for begin, part in pieces:
        if begin != at:
            raise DamagedError(f"{file.name}: its pieces do not lie one after another")
        at += part.bytes
    if at != file.bytes:
        raise DamagedError(f"{file.name}: the manifest says nothing of a part of it")
    return first


def as_json(name: str, value: Any) -> JsonValue:
    """`value` in JSON's own types. Raises RuntimeError, with `name`, where it holds anything that has none."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): as_json(f"{name}.{key}", item) for key, item in value.items()}
    raise RuntimeError(f"{name} is a {type(value).__name__}, which JSON does not hold")


def _tuples(value: JsonValue) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
