"""Whether a checkpoint's files are what its manifest says: names, sizes, headers, and every byte."""

from __future__ import annotations

from pathlib import Path

import xxhash

from shardlab.checkpoint.layout import Part
from shardlab.checkpoint.manifest import MANIFEST, DamagedError, FileEntry, Manifest, expected_header, parse
from shardlab.checkpoint.storage import LocalStorage, Reader, Storage
from shardlab.errors import UserError

READ_BYTES = 1024**2  # at a time: what verifying holds in memory; no larger piece was faster from a cold cache


def read_manifest(directory: Path, storage: Storage | None = None) -> Manifest:
    """The manifest of the checkpoint in `directory`. Raises UserError (DamagedError where it is damaged)."""
    storage = storage or LocalStorage()
    path = directory / MANIFEST
    try:
        reader = storage.open(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing: {directory} is not a checkpoint, or not a whole one") from error
    try:
        content = bytearray(reader.size)
        reader.read_into(0, memoryview(content))
    finally:
        reader.close()
    return parse(bytes(content), str(path))


def open_file(directory: Path, entry: FileEntry, storage: Storage) -> Reader:
    """A file of the checkpoint, of the size that the manifest says. Raises DamagedError or UserError."""
    path = directory / entry.name
    try:
        reader = storage.open(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    if reader.size != entry.bytes:
        reader.close()
        found = "is empty" if reader.size == 0 else f"has {reader.size:,} bytes"
        raise DamagedError(f"{path} {found}; by the manifest it has {entry.bytes:,}")
    return reader


def examine(directory: Path, storage: Storage | None = None, rank: int = 0, world_size: int = 1) -> list[str]:
    """Everything that is wrong with the checkpoint, a line each; of the files, every `world_size`-th is read.

    Memory: `READ_BYTES`, whatever a file or the manifest declares.
    """
    storage = storage or LocalStorage()
    try:
        manifest = read_manifest(directory, storage)
    except UserError as error:
        return [str(error)]
    entries = [*manifest.files, *manifest.attachments]
    expected = {MANIFEST, *(entry.name for entry in entries)}
    found = [
        f"{directory / name} is not part of this checkpoint: the manifest does not list it"
        for name in storage.names(directory)
        if name not in expected
    ]
    buffer = memoryview(bytearray(READ_BYTES))
    pieces = manifest.pieces_by_file()
    for number in range(rank, len(entries), world_size):
        try:
            inside = pieces[number] if number < len(pieces) else None
            _examine_file(directory, entries[number], inside, storage, buffer)
        except UserError as error:
            found.append(str(error))
        except OSError as error:
            found.append(f"{directory / entries[number].name} can't be read: {error.strerror}")
    return found


def verify(directory: Path, storage: Storage | None = None) -> Manifest:
    """Read the whole checkpoint. Raises DamagedError that names the first fault."""
    found = examine(directory, storage)
    if found:
        raise DamagedError(f"checkpoint {found[0]}")
    return read_manifest(directory, storage)


def _examine_file(
    directory: Path, entry: FileEntry, pieces: list[tuple[int, Part]] | None, storage: Storage, buffer: memoryview
) -> None:
    """`pieces`: what lies in it; None of an attachment."""
    path = directory / entry.name
    reader = open_file(directory, entry, storage)
    try:
        first = b"" if pieces is None else expected_header(entry, pieces)
        if _start(reader, len(first), buffer) != first:
            raise DamagedError(f"{path}: its header is not the one of these tensors")
        digest = xxhash.xxh3_128()
        for offset in range(0, reader.size, len(buffer)):
            piece = buffer[: min(len(buffer), reader.size - offset)]
            if reader.read_into(offset, piece) != len(piece):
                raise DamagedError(f"{path} ends while it is read")
            digest.update(piece)
    finally:
        reader.close()
    if digest.hexdigest() != entry.xxh3_128:
        raise DamagedError(f"{path}: its content is not what was written (by the manifest's hash)")


def _start(reader: Reader, length: int, buffer: memoryview) -> bytes:
    """The file's first `length` bytes; `length` comes from our own reckoning, within the file's size."""
    content = bytearray(length) if length > len(buffer) else buffer[:length]
    reader.read_into(0, memoryview(content))
    return bytes(content)
