"""A checkpoint -> a Hugging Face model directory, streamed: it never holds a whole tensor, let alone the model.

Config and tokenizer come from the checkpoint's attachments, or from a directory like the one wanted. The weights are
the masters, converted; of a run with adapters, the adapters alone, as peft reads them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from shardlab.checkpoint.layout import DTYPES, safetensors_header
from shardlab.checkpoint.listing import hidden_name
from shardlab.checkpoint.load import CheckpointReader
from shardlab.checkpoint.manifest import Manifest
from shardlab.checkpoint.storage import LocalStorage
from shardlab.checkpoint.verification import verify
from shardlab.checkpoint.write import memory
from shardlab.errors import UserError
from shardlab.model.lora import adapter_name
from shardlab.model.matching import PREFIX
from shardlab.state.box import boxes_of_range
from shardlab.state.fragment import BUFFER, FROZEN, MASTER
from shardlab.state.masks import MASKS

ExportDtype = Literal["auto", "bf16", "fp32"]

SHARD_BYTES = 4 * 1024**3  # of a file at most, or one tensor
ELEMENTS = 1 << 21  # held at a time

_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json")
_STORED = {"bf16": "BF16", "fp32": "F32"}
_CONFIG_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the model to write."""

    name: str  # in the checkpoint
    kind: str
    key: str  # in the file
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def export(
    directory: Path, output: Path, dtype: ExportDtype = "auto", like: Path | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model of the checkpoint in `directory` to `output`, which is there whole or not at all.

    `auto` is what the run computed in. `like`: a model directory to copy config and tokenizer from. Raises UserError
    if `output` exists, the checkpoint is damaged, or there is no config.
    """
    if output.exists():
        raise UserError(f"{output} exists; it is never overwritten. Remove it or choose another directory")
    manifest = verify(directory)
    partial = output.parent / hidden_name(output.name, "partial")
    partial.mkdir(parents=True)
    try:
        with CheckpointReader(directory) as reader:
            tensors = _tensors(manifest, _float_dtype(manifest, dtype))
            _copy_files(manifest, directory, like, partial)
            _write_configs(partial, directory, tensors)
            _write_shards(partial, tensors, reader, shard_bytes)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def parse_dtype(text: str) -> ExportDtype:
    """`text` as a dtype of an export. Raises UserError for any other."""
    for known in get_args(ExportDtype):
        if text == known:
            return cast(ExportDtype, text)
    raise UserError(f"--dtype {text}: choose one of {', '.join(get_args(ExportDtype))}")


def _float_dtype(manifest: Manifest, dtype: ExportDtype) -> str | None:
    """What floating-point tensors are converted to; None leaves them as they are stored."""
    if dtype != "auto":
        return _STORED[dtype]
    train = manifest.recipe.get("train")
    precision = train.get("precision") if isinstance(train, dict) else None
    return _STORED.get(precision) if isinstance(precision, str) else None


def _tensors(manifest: Manifest, dtype: str | None) -> list[_Tensor]:
    """What to write, larger elements first: so each tensor is aligned in its file."""
    values = [entry for entry in manifest.tensors if entry.kind in (MASTER, FROZEN, BUFFER)]
    values = [entry for entry in values if not entry.name.startswith(PREFIX)]  # the training's, not the model's
    adapters = {entry.name: key for entry in values if (key := adapter_name(entry.name)) is not None}
    found = []
    for entry in values:
        if adapters and entry.name not in adapters:
            continue  # the base is another model's
        converted = dtype if dtype is not None and DTYPES[entry.dtype].is_floating_point else entry.dtype
        key = adapters.get(entry.name, entry.name)
        found.append(_Tensor(entry.name, entry.kind, key, entry.shape, converted))
    return sorted(found, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)


def _copy_files(manifest: Manifest, directory: Path, like: Path | None, partial: Path) -> None:
    if like is None:
        sources = [directory / file.name for file in manifest.attachments]
    else:
        sources = [path for path in like.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS)]
        sources += [directory / file.name for file in manifest.attachments if file.name == MASKS]
    for source in sources:
        shutil.copyfile(source, partial / source.name)


def _write_configs(partial: Path, directory: Path, tensors: list[_Tensor]) -> None:
    """Give config.json the dtype that the weights have; it must be there."""
    adapters = any(adapter_name(tensor.name) is not None for tensor in tensors)
    wanted = partial / _CONFIGS[adapters]
    if not wanted.is_file():
        raise UserError(
            f"checkpoint {directory} holds no {wanted.name}: give --like DIR, a directory of the same model "
            "to take config and tokenizer from"
        )
    if adapters:
        return
    try:
        config = json.loads(wanted.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{wanted.name} of the model is not JSON: {error}") from error
    floats = [tensor.dtype for tensor in tensors if DTYPES[tensor.dtype].is_floating_point]
    config.pop("torch_dtype", None)
    if floats:
        config["dtype"] = _CONFIG_DTYPES.get(floats[-1], "float32")
    wanted.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shards(partial: Path, tensors: list[_Tensor], reader: CheckpointReader, shard_bytes: int) -> None:
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(one.bytes for one in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    adapters = any(adapter_name(tensor.name) is not None for tensor in tensors)
    stem = "adapter_model" if adapters else "model"
    if len(shards) == 1 or adapters:  # peft knows no index
        _write_shard(partial / f"{stem}.safetensors", tensors, reader)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(partial / name, shard, reader)
        weight_map |= {tensor.key: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.bytes for tensor in tensors)}, "weight_map": weight_map}
    (partial / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_shard(path: Path, tensors: list[_Tensor], reader: CheckpointReader) -> None:
    file = LocalStorage().create(path)
    try:
        file.write(safetensors_header(((t.key, t.dtype, t.shape) for t in tensors), format="pt"))
        for tensor in tensors:
            for piece in _pieces(tensor, reader):
                file.write(piece)
        file.sync()
    finally:
        file.close()


def _pieces(tensor: _Tensor, reader: CheckpointReader) -> Iterator[memoryview]:
    """Its bytes in row-major order, converted; each valid until the next."""
    size = math.prod(tensor.shape)
    buffer = torch.empty(min(size, ELEMENTS), dtype=DTYPES[tensor.dtype])
    for start in range(0, size, ELEMENTS):
        for box in boxes_of_range(tensor.shape, start, min(start + ELEMENTS, size)):
            into = buffer[: box.numel].view(box.lengths)
            reader.read_into(tensor.name, tensor.kind, box, into)
            yield memory(into)
