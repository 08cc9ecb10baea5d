"""Weights from a Hugging Face model directory, one tensor at a time, never the whole model."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardlab.errors import UserError
from shardlab.model.deferred import ModuleWeights, Weights


class DirectoryWeights:
    """Initial values read from safetensors files as they are asked for.

    Rows that the file lacks (a vocabulary enlarged since) come from `fresh`.
    """

    def __init__(
        self, files: dict[str, Path], stored_names: dict[str, str], shapes: dict[str, torch.Size], fresh: Weights
    ):
        self._files = files
        self._stored_names = stored_names
        self._shapes = shapes
        self._fresh = fresh

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        stored_name = self._stored_names[name]
        value = _read(self._files[stored_name], stored_name)
        value = value.float() if value.is_floating_point() else value
        rows = value.shape[0]
        if value.shape != self._shapes[name]:
            value = torch.cat([value, self._fresh.tensor(name)[rows:]])
        return value


def directory_weights(directory: Path, model: nn.Module, fresh: Weights) -> Weights:
    """The values in `directory` for `model` (parameters on the meta device).

    Where its files name the tensors otherwise than the model does (fused expert layers), transformers loads it whole.
    Raises UserError for a directory without safetensors, a tensor that is missing, or tied tensors that differ.
    """
    files = _files(directory)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    aliases = _aliases(model)
    stored_names: dict[str, str] = {}
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        spellings = [s for alias in aliases[name] for s in (alias, alias.removeprefix(prefix), prefix + alias)]
        found = [spelling for spelling in dict.fromkeys(spellings) if spelling in files]
        if not found or not _fits(files[found[0]], found[0], parameter.shape):
            return _loaded_by_transformers(directory, model)
        _check_tie(directory, files, found)
        stored_names[name] = found[0]
        shapes[name] = parameter.shape
    return DirectoryWeights(files, stored_names, shapes, fresh)


def _files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise UserError(f"model.path: {directory} holds no safetensors file (model.safetensors or its index)")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise UserError(f"model.path: {single} is damaged: {error}") from error


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        value: Tensor = opened.get_tensor(name)
    return value


def _fits(file: Path, name: str, shape: torch.Size) -> bool:
    """Whether the stored tensor has `shape`, or fewer rows of the same kind."""
    with safe_open(file, framework="pt") as opened:
        stored = opened.get_slice(name).get_shape()
    return list(stored) == list(shape) or (stored[1:] == list(shape[1:]) and stored[0] < shape[0])


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Canonical name -> all names of the same parameter."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return aliases


def _check_tie(directory: Path, files: dict[str, Path], found: list[str]) -> None:
    """A file may hold a tied tensor under both names; then they must be equal."""
    if len(found) == 1:
        return
    reference = _read(files[found[0]], found[0])
    for other in found[1:]:
        difference = (reference - _read(files[other], other)).abs().max().item()
        if difference > 0:
            raise UserError(
                f"model.path: {directory}: the config ties {found[0]} and {other}, but the file holds two tensors that "
                f"differ by up to {difference:g}; set tie_word_embeddings to false in config.json, or drop one of them"
            )


def _loaded_by_transformers(directory: Path, model: nn.Module) -> Weights:
    loaded, report = type(model).from_pretrained(  # type: ignore[attr-defined]
        directory, dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"model.path: {directory} lacks {len(missing)} tensors, among them {missing[0]}")
    loaded.resize_token_embeddings(model.config.vocab_size)  # type: ignore[union-attr]
    return ModuleWeights(loaded)
