"""Other tools' `torch.save` files, opened without running anything: `weights_only`, and stand-ins for known classes.

The classes that DeepSpeed puts into its files are not imported: each is replaced by one that holds nothing.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

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
