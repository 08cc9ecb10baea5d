"""A PyTorch DCP checkpoint of a model, with or without its optimizer, as fragments: a chunk of it at a time in memory.

Known are the state dicts of `get_state_dict` (nested or with `flatten_optimizer_state_dict`) and those of a module
alone. Which names are trained is what the optimizer's groups say; DCP knows no ties: a tied tensor is there under each
name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from shardlab.checkpoint.dcp_metadata import DCPMetadata, DCPTensor, Place, read_metadata
from shardlab.checkpoint.pickles import load_stream
from shardlab.checkpoint.save import Contents
from shardlab.checkpoint.storage import LocalStorage, Reader
from shardlab.errors import UserError
from shardlab.state.fragment import BUFFER, FROZEN, MASTER, Fragment, OptimizerState

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OBJECT_BYTES = 64 * 1024**2  # of a list of names, at most


class DCPFiles:
    """The checkpoint in `directory`. Raises UserError."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._metadata: DCPMetadata = read_metadata(directory)
        self._check_places()
        self._optimizer_at = self._find_optimizer()
        self.optimizer = self._read_optimizer()
        self._tensors = dict(self._find_tensors())

    def contents(self) -> Contents:
        """The steps of the optimizer are those of the checkpoint; of a model alone there are none."""
        steps = [int(kept["step"]) for kept in self.optimizer.scalars.values() if "step" in kept]
        return Contents(step=max(steps, default=0), optimizer=self.optimizer, parent=str(self.directory))

    def announced(self) -> Iterator[Fragment]:
        """The fragments without their values."""
        for (name, kind), (_, tensor) in self._tensors.items():
            for box, _ in tensor.chunks:
                value = torch.empty(box.lengths, dtype=tensor.dtype, device="meta")
                yield Fragment(name, kind, tensor.shape, box, value)

    def fragments(self) -> Iterator[Fragment]:
        """The same with them; each is read when it is asked for."""
        for (name, kind), (key, tensor) in self._tensors.items():
            for box, place in tensor.chunks:
                value = self._load(place)
                if not isinstance(value, Tensor) or value.dtype != tensor.dtype or tuple(value.shape) != box.lengths:
                    raise UserError(f"{self.directory / place.file} does not hold {key} at byte {place.offset}")
                yield Fragment(name, kind, tensor.shape, box, value)
                del value

    # --- the optimizer

    def _find_optimizer(self) -> str | None:
        """What its keys begin with; None of a model alone."""
        keys = [*self._metadata.tensors, *self._metadata.objects]
        found = {key[: match.start(1)] for key in keys if (match := re.search(r"(?:^|\.)(param_groups)\.", key))}
        found = {prefix for prefix in found if any(key.startswith(f"{prefix}state.") for key in keys)}
        if len(found) > 1:
            raise UserError(
                f"{self.directory} holds several optimizers ({', '.join(sorted(found))}): which is not known"
            )
        return next(iter(found), None)

    def _read_optimizer(self) -> OptimizerState:
        if self._optimizer_at is None:
            return OptimizerState()
        kinds: dict[str, None] = {}
        scalars: dict[str, dict[str, float]] = {}
        for key, tensor in self._metadata.tensors.items():
            name, kind = self._state_of(key)
            if name is None:
                continue
            if name.isdigit():
                raise UserError(
                    f"{self.directory} keeps optimizer state by positions instead of names: save it with "
                    "torch.distributed.checkpoint.state_dict.get_state_dict"
                )
            if self._is_scalar(kind, tensor):
                scalars.setdefault(name, {})[kind] = float(self._load(tensor.chunks[0][1]))
            else:
                kinds[kind] = None
        return OptimizerState(tuple(kinds), scalars, tuple(self._groups()))

    def _state_of(self, key: str) -> tuple[str | None, str]:
        """(name of the tensor, kind) of a key of the optimizer's state; (None, "") of any other."""
        start = f"{self._optimizer_at}state."
        if self._optimizer_at is None or not key.startswith(start):
            return None, ""
        name, _, kind = key.removeprefix(start).rpartition(".")
        return _plain(name), kind

    def _is_scalar(self, kind: str, tensor: DCPTensor) -> bool:
        return kind == "step" and tensor.shape == ()

    def _groups(self) -> list[dict[str, Any]]:
        """By group number, or by the name of a tensor: those of equal options are then a group."""
        start = f"{self._optimizer_at}param_groups."
        numbered: dict[int, dict[str, Any]] = {}
        named: dict[str, dict[str, Any]] = {}
        for key, value in self._options(start):
            owner, _, option = key.rpartition(".")
            if owner.isdigit():
                numbered.setdefault(int(owner), {})[option] = value
            else:
                named.setdefault(_plain(owner), {})[option] = value
        groups = []
        for _, options in sorted(numbered.items()):
            names = options.pop("params")
            groups.append({"names": [_plain(name) for name in names], **options})
        for name, options in named.items():
            like = next((group for group in groups if {**group, "names": 0} == {**options, "names": 0}), None)
            if like is None:
                groups.append({"names": [name], **options})
            else:
                like["names"].append(name)
        return groups

    def _options(self, start: str) -> Iterator[tuple[str, Any]]:
        for key, place in self._metadata.objects.items():
            if key.startswith(start):
                if place.length > _OBJECT_BYTES:
                    raise UserError(f"{self.directory}: {key} has {place.length:,} bytes, more than any option")
                yield key.removeprefix(start), self._load(place)
        for key, tensor in self._metadata.tensors.items():  # a learning rate that is a tensor
            if key.startswith(start) and tensor.shape == ():
                yield key.removeprefix(start), float(self._load(tensor.chunks[0][1]))

    # --- the tensors

    def _find_tensors(self) -> Iterator[tuple[tuple[str, str], tuple[str, DCPTensor]]]:
        """((name, kind), (key, tensor)) of everything that has elements and belongs to the model."""
        trained = {name for group in self.optimizer.groups for name in group["names"]}
        values = self._model_keys(trained)
        for name, key in values.items():
            tensor = self._metadata.tensors[key]
            trains = name in trained or (not trained and tensor.dtype.is_floating_point)
            kind = MASTER if trains else FROZEN if tensor.dtype.is_floating_point else BUFFER
            yield (name, kind), (key, tensor)
        for key, tensor in self._metadata.tensors.items():
            owner, kind = self._state_of(key)
            if owner is None or self._is_scalar(kind, tensor):
                continue
            if owner not in values or self._metadata.tensors[values[owner]].shape != tensor.shape:
                raise UserError(f"{self.directory}: {key} has no tensor of the model of its name and shape")
            yield (owner, kind), (key, tensor)

    def _model_keys(self, trained: set[str]) -> dict[str, str]:
        """Name -> key of the model's tensors: the one dict of tensors, or that which the optimizer trains."""
        outside = (f"{self._optimizer_at}state.", f"{self._optimizer_at}param_groups.")
        dicts: dict[tuple[str | int, ...], dict[str, str]] = {}
        for key in self._metadata.tensors:
            if self._optimizer_at is None or not key.startswith(outside):
                *within, name = self._metadata.paths[key]
                dicts.setdefault(tuple(within), {})[_plain(str(name))] = key
        whole = [names for names in dicts.values() if trained <= names.keys()]
        if len(whole) > 1:
            whole = [names for within, names in dicts.items() if within and within[-1] == "model" and names in whole]
        if len(whole) != 1:
            listed = ", ".join(".".join(map(str, within)) or "the top" for within in dicts) or "none"
            raise UserError(f"{self.directory}: which tensors are the model's is not clear (there are: {listed})")
        names = whole[0]
        if all(name.startswith("module.") for name in names) and not trained:  # of DDP
            return {name.removeprefix("module."): key for name, key in names.items()}
        return names

    def _check_places(self) -> None:
        """Whether every file is there and long enough, before anything is made of what the metadata declares."""
        sizes: dict[str, int] = {}
        chunks = (place for tensor in self._metadata.tensors.values() for _, place in tensor.chunks)
        for place in (*chunks, *self._metadata.objects.values()):
            if place.file not in sizes:
                with self._opened(place.file) as reader:
                    sizes[place.file] = reader.size
            if place.offset + place.length > sizes[place.file]:
                size = f"{sizes[place.file]:,}"
                raise UserError(
                    f"{self.directory / place.file} has {size} bytes; by the metadata something lies beyond them"
                )

    def _load(self, place: Place) -> Any:
        with self._opened(place.file) as reader:
            stream = io.BufferedReader(_Range(reader, place))
            return load_stream(cast(BinaryIO, stream), place.length, self.directory / place.file)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Reader]:
        """One at a time: there may be a file for each tensor, more than a process may have open."""
        path = self.directory / name
        try:
            reader = LocalStorage().open(path)
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}") from error
        try:
            yield reader
        finally:
            reader.close()


class _Range(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, reader: Reader, place: Place):
        self._reader = reader
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._place.length - self._at)]
        done = self._reader.read_into(self._place.offset + self._at, wanted)
        self._at += done
        return done


def _plain(name: str) -> str:
    """The model's own name."""
    return _WRAPPERS.sub("", name)
