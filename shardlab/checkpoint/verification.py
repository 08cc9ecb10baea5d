"""Whether a checkpoint's files are what its manifest says: names, sizes, headers, and every byte."""

from __future__ import annotations

from pathlib import Path

import xxhash

from shardlab.checkpoint.manifest import MANIFEST, DamagedError, Manifest, expected_header, parse
from shardlab.checkpoint.storage import LocalStorage, Reader, Storage
from shardlab.errors import UserError

READ_BYTES = 4 * 1024**2  # at a time: what verifying holds in memory


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


def open_file(directory: Path, manifest: Manifest, file: int, storage: Storage) -> Reader:
    """`files[file]`, of the size that the manifest says. Raises DamagedError or UserError."""
    entry = manifest.files[file]
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
    """Everything that is wrong with the checkpoint, a line each; the content of every `world_size`-th file is read.

    Memory: `READ_BYTES`, whatever a file or the manifest declares.
    """
    storage = storage or LocalStorage()
    try:
        manifest = read_manifest(directory, storage)
    except UserError as error:
        return [str(error)]
    expected = {MANIFEST, *(file.name for file in manifest.files)}
    found = [
        f"{directory / name} is not part of this checkpoint: the manifest does not list it"
        for name in storage.names(directory)
        if name not in expected
    ]
    buffer = memoryview(bytearray(READ_BYTES))
    for file in range(rank, len(manifest.files), world_size):
        try:
            _examine_file(directory, manifest, file, storage, buffer)
        except UserError as error:
            found.append(str(error))
        except OSError as error:
            found.append(f"{directory / manifest.files[file].name} can't be read: {error.strerror}")
    return found


def verify(directory: Path, storage: Storage | None = None) -> Manifest:
    """Read the whole checkpoint. Raises DamagedError that names the first fault."""
    found = examine(directory, storage)
    if found:
        raise DamagedError(f"checkpoint {found[0]}")
    return read_manifest(directory, storage)


def _examine_file(directory: Path, manifest: Manifest, file: int, storage: Storage, buffer: memoryview) -> None:
    path = directory / manifest.files[file].name
    reader = open_file(directory, manifest, file, storage)
    try:
        first = expected_header(manifest, file)
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
    if digest.hexdigest() != manifest.files[file].xxh3_128:
        raise DamagedError(f"{path}: its content is not what was written (by the manifest's hash)")


def _start(reader: Reader, length: int, buffer: memoryview) -> bytes:
    """The file's first `length` bytes; `length` comes from our own reckoning, within the file's size."""
    content = bytearray(length) if length > len(buffer) else buffer[:length]
    reader.read_into(0, memoryview(content))
    return bytes(content)
