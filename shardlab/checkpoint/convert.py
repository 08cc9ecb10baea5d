"""Other tools' checkpoints -> one of ours: DeepSpeed's ZeRO, PyTorch's DCP, and Hugging Face model directories.

Their tensors are mapped or read one by one, never loaded together, and written piece by piece. What they lack (the
schedule, the position in the data) the checkpoint lacks too: a run that goes on from it takes the recipe's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from shardlab.checkpoint.dcp_files import DCPFiles
from shardlab.checkpoint.dcp_metadata import METADATA
from shardlab.checkpoint.layout import parts_of
from shardlab.checkpoint.save import Contents, Saver, run_course
from shardlab.checkpoint.zero_files import ZeROFiles, tag_directory
from shardlab.errors import UserError
from shardlab.state.box import whole
from shardlab.state.fragment import MASTER, Fragment
from shardlab.state.masks import MASKS

_INDEX = "model.safetensors.index.json"
_PLAIN_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_ATTACHED = (".json", ".txt", ".model", ".jinja")


def convert(source: Path, root: Path) -> Path:
    """Save what `source` holds as a checkpoint in `root`; its directory. Raises UserError for what is not known."""
    if not source.is_dir():
        raise UserError(f"{source} is not a directory")
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root} is not empty; give a directory that can be made")
    if any(path.name.endswith("_model_states.pt") for path in tag_directory(source).iterdir()):
        try:
            zero = ZeROFiles(source)
            return Saver(root).save(zero.contents(), zero.fragments)
        except (RuntimeError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(f"{source} is no checkpoint of DeepSpeed that can be read: {error!r}") from error
    if (source / METADATA).exists() or (source / METADATA).is_symlink():
        return _convert_dcp(source, root)
    files = _model_files(source)
    contents = Contents(step=0, attachments=_attachments(source), parent=str(source))
    return Saver(root).save(contents, lambda: _model_fragments(files))


def _convert_dcp(source: Path, root: Path) -> Path:
    """Announced first without values, so that each chunk is read once."""
    try:
        theirs = DCPFiles(source)
        saver = Saver(root)
        draft = saver.begin(theirs.contents(), theirs.announced)
        return run_course(saver.course(draft, parts_of(theirs.fragments(), saver.file_bytes)), saver.ranks)
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{source} is no checkpoint of DCP that can be read: {error!r}") from error


def _model_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory."""
    if (directory / _INDEX).is_file():
        try:
            weight_map = json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{directory / _INDEX} is damaged: {error!r}") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        path = directory / name
        if not _PLAIN_FILE.fullmatch(name):
            raise UserError(f"{directory / _INDEX} names {name!r}, which is no plain name of a file beside it")
        if path.is_symlink() and path.resolve().parent.name != "blobs":  # a download's cache has links into it
            raise UserError(f"{path} is a link, which is not followed")
        if not path.is_file():
            raise UserError(
                f"{path} is missing: {directory} is neither a model directory nor a checkpoint of DeepSpeed or DCP"
            )
    return [directory / name for name in names]


def _model_fragments(files: list[Path]) -> Iterator[Fragment]:
    """Every tensor whole; safetensors maps it, and it is read as it is written."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    value = opened.get_tensor(name)
                    box = whole(tuple(value.shape))
                    if box is not None:
                        yield Fragment(name, MASTER, tuple(value.shape), box, value)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged: {error}") from error


def _attachments(directory: Path) -> dict[str, bytes]:
    """Config, tokenizer and masks."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name.endswith((*_ATTACHED, MASKS)) and not path.name.endswith(".index.json")
    }
