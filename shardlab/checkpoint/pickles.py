"""Other tools' `torch.save` files, opened without running anything: `weights_only`, and stand-ins for known classes.

The classes that DeepSpeed puts into its files are not imported: each is replaced by one that holds nothing.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardlab.errors import UserError


class _Ignored:
    """Takes the place of an object whose content does not matter here."""


_STAND_INS: list[Any] = [
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def load_mapped(path: Path) -> Any:
    """What `torch.save` wrote to `path`, its tensors mapped: a byte is read when it is used.

    Raises UserError for a link, a damaged file, or one that holds anything but tensors and plain data.
    """
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{path} is {'a link' if path.is_symlink() else 'missing'}")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not a file of torch.save (its zip format), or it is damaged")
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        line = next((line.strip() for line in f"{error}".splitlines() if "GLOBAL" in line), "not plain data")
        raise UserError(f"{path} holds more than tensors and plain data, which could run code: {line}") from error
    except (RuntimeError, EOFError, ValueError) as error:
        first = next(iter(f"{error}".splitlines()), "")
        raise UserError(f"{path} can't be read: {first}") from error


_HARMLESS = re.compile(
    r"(PROTO|FRAME|STOP|MARK|POP|MEMOIZE|(LONG_)?(BIN)?(PUT|GET)|NONE|NEWTRUE|NEWFALSE|(BIN)?INT[12]?|LONG[1]?|(BIN)?FLOAT"
    r"|(SHORT_)?(BIN)?(UNICODE|BYTES)8?|(EMPTY_)?(TUPLE|LIST|DICT)|TUPLE[123]|APPENDS?|SETITEMS?|(STACK_)?GLOBAL|NEWOBJ"
    r"|REDUCE|BUILD|BINPERSID)"
)
_STREAM_GLOBALS = frozenset(
    {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict", "torch device"}
)


class Record:
    """Takes the place of an object of another library's class: what made it, and its state; it does nothing."""

    state: Any = None

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Restricted(pickle.Unpickler):
    """Knows the classes that it is given, and no other."""

    def __init__(self, content: bytes, classes: Mapping[str, Any], where: Path):
        super().__init__(io.BytesIO(content))
        self._classes = classes
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in self._classes:
            raise _refused(self._where, f"{module}.{name}")
        return self._classes[f"{module} {name}"]


def load_restricted(content: bytes, classes: Mapping[str, Any], where: Path) -> Any:
    """What the pickle `content` holds: plain data, and of `classes` ("module name" -> what to call for it).

    Its opcodes are looked through first: none allocates by a number that the file declares. Raises UserError.
    """
    check_opcodes(content, where)
    try:
        return _Restricted(content, classes, where).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UserError(f"{where} is damaged: {error}") from error


def check_opcodes(content: bytes, where: Path) -> list[str]:
    """The globals that the pickle names outright. Raises UserError where an opcode could allocate or run anything."""
    found = []
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if not _HARMLESS.fullmatch(opcode.name):
                raise _refused(where, f"the opcode {opcode.name}")
            if opcode.name.endswith("PUT") and int(str(argument)) > number:
                raise UserError(f"{where} is damaged: a memo entry {argument} where there can be {number}")
            if opcode.name == "GLOBAL":
                found.append(str(argument))
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}") from error
    return found


def load_stream(stream: BinaryIO, size: int, where: Path) -> Any:
    """What `torch.save` wrote to `stream`, of `size` bytes, by `weights_only`. Allocates no more than `size`.

    Raises UserError for anything but tensors and plain data, for compressed or oversized records, and for damage.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            packed = [record for record in records if record.compress_type or record.file_size != record.compress_size]
            if packed or sum(record.file_size for record in records) > size:
                raise UserError(f"{where} holds a record larger than itself; torch.save writes none")
            for record in records:
                if record.filename.endswith(".pkl"):
                    for name in check_opcodes(archive.read(record), where):
                        if name not in _STREAM_GLOBALS and not re.fullmatch(r"torch \w+(Storage|\d)", name):
                            raise _refused(where, name.replace(" ", "."))
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        first = next(iter(f"{error}".splitlines()), "")
        raise UserError(f"{where} can't be read: {first}") from error


def _refused(where: Path, what: str) -> UserError:
    return UserError(f"{where} holds more than tensors and plain data, which could run code: {what}")
