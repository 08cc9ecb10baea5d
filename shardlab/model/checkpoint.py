"""Weights from a Hugging Face model directory, one tensor at a time, never the whole model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import logging

from shardlab.errors import UserError
from shardlab.model.deferred import ModuleWeights, Weights
from shardlab.model.trainable import persistent_buffers


class DirectoryWeights:
    """Initial values read from safetensors files as they are asked for."""

    def __init__(self, files: dict[str, Path], stored_names: dict[str, str]):
        self._files = files
        self._stored_names = stored_names

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        stored_name = self._stored_names[name]
        value = _read(self._files[stored_name], stored_name)
        return value.float() if value.is_floating_point() else value


class EnlargedWeights:
    """`stored` values; rows that they lack (a vocabulary enlarged since) come from `fresh`."""

    def __init__(self, stored: Weights, shapes: dict[str, torch.Size], fresh: Weights):
        self._stored = stored
        self._shapes = shapes
        self._fresh = fresh

    def tensor(self, name: str) -> Tensor:
        """See `Weights.tensor`."""
        value = self._stored.tensor(name)
        if value.shape == self._shapes[name]:
            return value
        return torch.cat([value, self._fresh.tensor(name)[value.shape[0] :]])


def directory_weights(directory: Path, model: nn.Module, fresh: Weights) -> Weights:
    """The values in `directory` for `model` (parameters on the meta device).

    Where its files name the tensors otherwise than the model does (fused expert layers), transformers loads it whole.
    Raises UserError for a directory without safetensors, a damaged file, a tensor that is missing or of another shape
    than the config says, or tied tensors that differ.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    files = weight_files(directory)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    aliases = _aliases(model)
    vocabulary = _vocabulary_tensors(model)
    stored_names: dict[str, str] = {}
    for name, parameter in parameters.items():
        spellings = [s for alias in aliases[name] for s in (alias, alias.removeprefix(prefix), prefix + alias)]
        found = [spelling for spelling in dict.fromkeys(spellings) if spelling in files]
        fits = [_fits(files[one], one, parameter.shape, id(parameter) in vocabulary) for one in found]
        if not found or not all(fits):
            return EnlargedWeights(_loaded_by_transformers(directory, model), shapes, fresh)
        _check_tie(directory, files, found)
        stored_names[name] = found[0]
    return EnlargedWeights(DirectoryWeights(files, stored_names), shapes, fresh)


def load_buffers(directory: Path, model: nn.Module) -> None:
    """Give `model`'s persistent buffers the values in `directory`; where it has none they stay as constructed."""
    files = weight_files(directory)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name, buffer in persistent_buffers(model):
        stored = name.replace(".base_layer", "")
        spelling = next((one for one in (stored, stored.removeprefix(prefix), prefix + stored) if one in files), None)
        if spelling is None:
            continue
        value = _read(files[spelling], spelling)
        if value.shape != buffer.shape:
            raise UserError(
                f"model.path: {directory}: {spelling} is {tuple(value.shape)} in the file, but {tuple(buffer.shape)} "
                "by config.json"
            )
        buffer.copy_(value)


def weight_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it. Raises UserError where there is none, or the index is damaged."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError) as error:
            raise UserError(f"model.path: {index} is damaged: {error!r}") from error
    single = directory / "model.safetensors"
    if not single.is_file():
        raise UserError(f"model.path: {directory} holds no safetensors file (model.safetensors or its index)")
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Raises UserError for a file that is missing or damaged, also if that shows inside."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except FileNotFoundError as error:
        raise UserError(f"model.path: {file} is missing, though the directory's index names it") from error
    except SafetensorError as error:
        raise UserError(f"model.path: {file} is damaged: {error}") from error


def _read(file: Path, name: str) -> Tensor:
    with _opened(file) as opened:
        value: Tensor = opened.get_tensor(name)
    return value


def _fits(file: Path, name: str, shape: torch.Size, may_grow: bool) -> bool:
    """Whether the stored tensor has `shape`, or, where rows may be added, fewer of the same kind."""
    with _opened(file) as opened:
        stored = list(opened.get_slice(name).get_shape())
    wanted = list(shape)
    return stored == wanted or (may_grow and stored[1:] == wanted[1:] and stored[0] < wanted[0])


def _vocabulary_tensors(model: nn.Module) -> set[int]:
    """Identities of the parameters with a row for each token: the only ones that a new vocabulary enlarges."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}


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
    with _quiet():
        loaded, report = type(model).from_pretrained(  # type: ignore[attr-defined]
            directory, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"model.path: {directory} lacks {len(missing)} tensors, among them {missing[0]}")
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"model.path: {directory}: {name} is {tuple(stored)} in the file, but {tuple(wanted)} by config.json"
        )
    return ModuleWeights(loaded)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' table and progress bar: what matters of them is in our own message."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
