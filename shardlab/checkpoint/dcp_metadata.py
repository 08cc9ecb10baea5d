"""The `.metadata` of a PyTorch DCP checkpoint: which tensors, in which chunks, at which bytes of which files.

It is a pickle. It is read by an unpickler that knows DCP's own classes by name and puts stand-ins that do nothing in
their place; then everything is checked before a byte of a tensor is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardlab.checkpoint.coverage import coverage_fault
from shardlab.checkpoint.layout import DTYPES
from shardlab.checkpoint.pickles import Record, load_restricted
from shardlab.checkpoint.storage import LocalStorage
from shardlab.errors import UserError
from shardlab.state.box import Box

METADATA = ".metadata"

_METADATA_BYTES = 1 << 30  # at most; a checkpoint of 1,000 tensors on 1,000 ranks has a fifth of it
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.distcp")
_DIMS = 32


def _stand_in(name: str) -> type[Record]:
    return type(name, (Record,), {})


_TENSOR, _BYTES = _stand_in("TensorStorageMetadata"), _stand_in("BytesStorageMetadata")
_CLASSES: dict[str, Any] = {
    **{
        f"torch.distributed.checkpoint.metadata {name}": _stand_in(name)
        for name in ("Metadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
    },
    "torch.distributed.checkpoint.metadata TensorStorageMetadata": _TENSOR,
    "torch.distributed.checkpoint.metadata BytesStorageMetadata": _BYTES,
    "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING": _stand_in("_MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem _StorageInfo": _stand_in("_StorageInfo"),
    "torch.serialization _get_layout": _stand_in("layout"),
    "torch Size": lambda *dims: tuple(*dims),
    "collections OrderedDict": dict,
    **{f"{module} {name}": Record for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **{f"torch {str(dtype).removeprefix('torch.')}": dtype for dtype in DTYPES.values()},
}


@dataclass(frozen=True)
class Place:
    """Bytes of a file that `torch.save` wrote."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DCPTensor:
    """One tensor: `chunks` make it up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[Box, Place], ...]


@dataclass(frozen=True)
class DCPMetadata:
    """Everything in the checkpoint by its flattened key; `paths[key]` are the keys of the nested dicts before that."""

    tensors: Mapping[str, DCPTensor]
    objects: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]]


def read_metadata(directory: Path) -> DCPMetadata:
    """The metadata of the checkpoint in `directory`. Raises UserError."""
    path = directory / METADATA
    reader = LocalStorage().open(path)
    try:
        if reader.size > _METADATA_BYTES:
            raise UserError(f"{path} has {reader.size:,} bytes, more than any checkpoint's")
        content = bytearray(reader.size)
        reader.read_into(0, memoryview(content))
    finally:
        reader.close()
    found = load_restricted(bytes(content), _CLASSES, path)
    try:
        return _checked(found.state, path)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path} is not of a layout that is known: {error!r}") from error


def _checked(state: dict[str, Any], path: Path) -> DCPMetadata:
    places: dict[str, dict[tuple[int, ...] | None, Place]] = {}
    for index, info in state["storage_data"].items():
        offset = index.state.get("offset")
        places.setdefault(index.state["fqn"], {})[None if offset is None else _dims(offset)] = _place(info.state, path)
    tensors, objects = {}, {}
    for key, entry in state["state_dict_metadata"].items():
        if isinstance(entry, _TENSOR):
            tensors[key] = _tensor(key, entry.state, places.get(key, {}), path)
        elif isinstance(entry, _BYTES):
            objects[key] = places[key][None]
        else:
            raise TypeError(f"{key} is a {type(entry).__name__}")
    paths = {key: tuple(keys) for key, keys in (state.get("planner_data") or {}).items()}
    return DCPMetadata(tensors, objects, {key: paths.get(key, (key,)) for key in (*tensors, *objects)})


def _place(state: dict[str, Any], path: Path) -> Place:
    name, offset, length = state["relative_path"], _count(state["offset"]), _count(state["length"])
    if not _FILE_NAME.fullmatch(name):
        raise UserError(f"{path} names {name!r}, which is no plain name of a .distcp file beside it")
    if state.get("transform_descriptors"):
        raise UserError(f"{path}: {name} was written with {state['transform_descriptors']}, which can't be read")
    return Place(name, offset, length)


def _tensor(key: str, state: dict[str, Any], places: dict[tuple[int, ...] | None, Place], path: Path) -> DCPTensor:
    """Its chunks checked: inside the tensor, all of it once, and no larger than the bytes that hold them."""
    shape = _dims(state["size"])
    dtype = state["properties"].state[0]
    if dtype not in DTYPES.values():
        raise TypeError(f"{key} has dtype {dtype}")
    chunks = []
    for chunk in state["chunks"]:
        offsets, lengths = _dims(chunk.state["offsets"]), _dims(chunk.state["sizes"])
        if not all(lengths):
            continue
        box = Box(offsets, lengths)
        place = places[offsets] if offsets in places else places[None]
        if not box.fits(shape) or box.numel * dtype.itemsize > place.length:
            raise UserError(
                f"{path}: {key} has {box}, which does not fit its shape {shape} or its {place.length} bytes"
            )
        chunks.append((box, place))
    fault = coverage_fault(shape, [box for box, _ in chunks])
    if fault is not None:
        raise UserError(f"{path}: {key} is not whole: {fault}")
    return DCPTensor(shape, dtype, tuple(chunks))


def _dims(value: Any) -> tuple[int, ...]:
    dims = tuple(_count(one) for one in value)
    if len(dims) > _DIMS:
        raise ValueError(f"{len(dims)} dims")
    return dims


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} where a count is expected")
    return value
