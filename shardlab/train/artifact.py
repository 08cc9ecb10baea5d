"""The model as a Hugging Face directory, written tensor by tensor: no rank ever holds it whole."""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardlab.backends.base import all_reduce_sum
from shardlab.errors import UserError
from shardlab.model.lora import (
    adapted_layers,
    adapter_tensors,
    merged_tensors,
    transposed_layers,
    write_adapter_config,
)
from shardlab.model.matching import PREFIX
from shardlab.model.trainable import Trainable
from shardlab.planner.around import SHARD_BYTES
from shardlab.recipe import ModelSection
from shardlab.state.masks import MASKS, Masks
from shardlab.topology import Topology


def save_artifact(
    directory: Path,
    module: Trainable,
    tensors: Iterator[tuple[str, Tensor]],
    tokenizer: Any,
    topology: Topology,
    model: ModelSection,
    masks: Masks,
) -> None:
    """Write `tensors` (collective, in the same order on every rank) and what else `from_pretrained` wants.

    With `model.lora` that is an adapter directory, or the merged model. `masks` go along.

    The directory is there whole or not at all: it is written beside and renamed. Raises UserError if it exists, and
    RuntimeError if a tensor is not of the model's own shape (a sharded parameter saved as it lies has zero elements).
    """
    # The first rank looks for all: a slower one could find what the first has just written.
    taken = torch.tensor(float(topology.is_main and directory.exists()), device=topology.device)
    if all_reduce_sum(taken, topology) > 0:
        raise UserError(f"{directory} exists; it is never overwritten. Remove it or choose another directory")
    if not topology.is_main:
        for _ in tensors:  # the gathers are collectives; what they gather is the first rank's to write
            continue
        all_reduce_sum(torch.zeros(1, device=topology.device), topology)
        return
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_model(partial, module, chain(checked(tensors, module.shapes), _buffers(module)), model)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    _write_masks(partial, masks)
    os.replace(partial, directory)
    all_reduce_sum(torch.zeros(1, device=topology.device), topology)  # no rank reads it before it is there


def model_files(module: Trainable, tokenizer: Any, model: ModelSection, masks: Masks) -> dict[str, bytes]:
    """The files beside the weights that `from_pretrained` wants, by name: a checkpoint takes them along.

    With adapters, those of an adapter directory, merged or not.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if model.lora is None:
            _write_config(directory, module, torch.float32)
        else:
            _write_adapter_config(directory, module, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        _write_masks(directory, masks)
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def checked(tensors: Iterator[tuple[str, Tensor]], shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, each compared with the shape that the model was built with; at the end, none may be missing.

    Projections of hidden states are left out: they are the training's.
    """
    left = {name: shape for name, shape in shapes.items() if not name.startswith(PREFIX)}
    for name, tensor in tensors:
        if name.startswith(PREFIX):
            continue
        if tensor.shape != left.pop(name, None):
            raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(shapes.get(name, ()))}")
        yield name, tensor
    if left:
        raise RuntimeError(f"{len(left)} tensors of the model are missing, among them {next(iter(left))}")


def _write_masks(directory: Path, masks: Masks) -> None:
    if masks:
        (directory / MASKS).write_bytes(masks.dump())


def _buffers(module: Trainable) -> Iterator[tuple[str, Tensor]]:
    """This rank's: what a rank's own batches have changed (a batch norm's statistics) is the first rank's view."""
    for name, buffer in module.named_kept_buffers():
        yield name, buffer.detach().cpu()


def _write_model(
    directory: Path, module: Trainable, tensors: Iterator[tuple[str, Tensor]], model: ModelSection
) -> None:
    if model.lora is None:
        _write_config(directory, module, write_tensors(directory, tensors, SHARD_BYTES))
    elif model.lora.merge:
        merged = merged_tensors(tensors, model.lora, transposed_layers(module))
        _write_config(directory, module, write_tensors(directory, merged, SHARD_BYTES))
    else:
        save_file(dict(adapter_tensors(tensors)), directory / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_adapter_config(directory, module, model)


def _write_adapter_config(directory: Path, module: Trainable, model: ModelSection) -> None:
    assert model.lora is not None
    assert model.path is not None
    layers = adapted_layers(iter(module.shapes))
    write_adapter_config(directory, model.lora, str(Path(model.path).resolve()), layers)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> torch.dtype:
    """Write safetensors files of at most `shard_bytes` (or one tensor) and their index; return the last float dtype.

    What a file holds is in memory until the file is written.
    """
    files: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total, size, dtype = 0, 0, torch.float32

    def flush() -> None:
        path = directory / f"part-{len(files)}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        files.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        dtype = tensor.dtype if tensor.is_floating_point() else dtype
        bytes_ = tensor.numel() * tensor.element_size()
        if pending and size + bytes_ > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.contiguous()
        size += bytes_
        total += bytes_
    flush()
    if len(files) == 1:
        files[0][0].rename(directory / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return dtype


def _write_config(directory: Path, module: Trainable, dtype: torch.dtype) -> None:
    """config.json and generation_config.json of a Hugging Face model; another module has none."""
    config = getattr(module, "config", None)
    if config is None:
        return
    from transformers import GenerationConfig

    config = copy.deepcopy(config)
    config.architectures = [module.architecture]
    config.dtype = dtype
    config.save_pretrained(directory)
    # Not by save_pretrained, which may refuse at the end of a run what a directory came with.
    generation = module.generation_config or GenerationConfig.from_model_config(config)
    generation.to_json_file(directory / "generation_config.json")
