"""PyTorch DCP directories: hostile ones are refused, nothing in them is run, and nothing is allocated by what they say.

Field case B45: https://github.com/NVIDIA-NeMo/Automodel/pull/3240, https://github.com/meta-pytorch/torchtune/issues/1142
"""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

from shardlab.checkpoint import CheckpointReader, Contents, Saver, verify
from shardlab.checkpoint.convert import convert
from shardlab.checkpoint.convert_to import convert_to
from shardlab.checkpoint.pickles import load_restricted
from shardlab.cli import app
from shardlab.errors import UserError
from shardlab.state.box import whole
from shardlab.state.fragment import MASTER, OptimizerState
from tests.checkpoint.growth import growth
from tests.checkpoint.support import small_state, whole_fragments

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def theirs(directory: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """One process, one step of AdamW, saved by DCP."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model, state = get_state_dict(module, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=directory, no_dist=True)
    return module, optimizer


def change(directory: Path, edit: Callable[[Any], object]) -> None:
    """Edit the metadata by DCP's own classes."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    edit(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def of(metadata: Any, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def test_one_process(tmp_path: Path) -> None:
    module, optimizer = theirs(tmp_path / "theirs")
    done = CliRunner().invoke(app, ["checkpoint", "convert", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    path = tmp_path / "ours" / "step-00000001"
    assert done.stdout == f"checkpoint: {path}\n"
    assert verify(path).parent == str(tmp_path / "theirs")
    with CheckpointReader(path) as reader:
        for name, parameter in module.named_parameters():
            for kind, value in {MASTER: parameter, **optimizer.state[parameter]}.items():
                if kind == "step":
                    assert reader.optimizer.scalars[name] == {"step": 1.0}
                    continue
                into = torch.empty(value.shape)
                box = whole(tuple(value.shape))
                assert box is not None
                reader.read_into(name, kind, box, into)
                assert torch.equal(into, value), (name, kind)


class _Marker:
    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_as_metadata_is_never_run(tmp_path: Path) -> None:
    theirs(tmp_path / "theirs")
    marker = tmp_path / "marker"
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(_Marker(marker)))
    with pytest.raises(UserError, match=r"\.metadata holds more than .* posix\.mkdir"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    change_to_marker = tmp_path / "other"
    theirs(change_to_marker)
    change(change_to_marker, lambda metadata: setattr(metadata, "planner_data", _Marker(marker)))
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        convert(change_to_marker, tmp_path / "ours")
    assert not marker.exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("key", ["model.0.weight", "optimizer.param_groups.0.lr"])
def test_a_pickle_in_a_chunks_place_is_never_run(tmp_path: Path, key: str) -> None:
    directory, marker = tmp_path / "theirs", tmp_path / "marker"
    theirs(directory)
    torch.save(_Marker(marker), directory / "__9_9.distcp")
    size = (directory / "__9_9.distcp").stat().st_size

    def edit(metadata: Any) -> None:
        of(metadata, key).__dict__.update(relative_path="__9_9.distcp", offset=0, length=size)

    change(directory, edit)
    with pytest.raises(UserError, match=r"__9_9\.distcp holds more than .* posix\.mkdir"):
        convert(directory, tmp_path / "ours")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "__0_0.pt", "", 3, "a/b.distcp"])
def test_a_place_that_leads_away(tmp_path: Path, name: object) -> None:
    theirs(tmp_path / "theirs")
    change(tmp_path / "theirs", lambda metadata: setattr(of(metadata, "model.0.weight"), "relative_path", name))
    with pytest.raises(UserError, match=r"no plain name|is not of a layout"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_links_are_not_followed(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        directory = tmp_path / f"of-{name}"
        theirs(directory)
        (directory / name).rename(tmp_path / name)
        (directory / name).symlink_to(tmp_path / name)
        with pytest.raises(UserError, match="is a link"):
            convert(directory, tmp_path / "ours")


@pytest.mark.parametrize("field", ["length", "offset"])
def test_a_place_beyond_the_file(tmp_path: Path, field: str) -> None:
    theirs(tmp_path / "theirs")
    change(tmp_path / "theirs", lambda metadata: setattr(of(metadata, "model.0.weight"), field, 2**60))
    with pytest.raises(UserError, match="something lies beyond them"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_a_shape_that_is_too_large_or_not_whole(tmp_path: Path) -> None:
    def huge(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.0.weight"]
        entry.size = torch.Size((2**30, 2**30))
        entry.chunks[0].sizes = entry.size

    def lacking(metadata: Any) -> None:
        metadata.state_dict_metadata["model.0.weight"].size = torch.Size((3, 3))

    for name, edit, match in (("huge", huge, "does not fit"), ("lacking", lacking, r"element \(2, 0\) is missing")):
        directory = tmp_path / name
        theirs(directory)
        change(directory, edit)

        def refused(directory: Path = directory, match: str = match) -> None:
            with pytest.raises(UserError, match=match):
                convert(directory, tmp_path / "ours")

        assert growth(refused) < 16 * 1024**2


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\x80\x05\x96" + (2**34).to_bytes(8, "little") + b".", "BYTEARRAY8|expected"),
        (b"\x80\x05\x8d" + (2**34).to_bytes(8, "little") + b"x.", "expected"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a memo entry 2147483647"),
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),
        (b"\x80\x02cos\nsystem\n.", r"os\.system"),
        (b"\x80\x02", "pickle exhausted"),
        (b"", "pickle exhausted"),
        (b"\x80\x02}.", None),
    ],
)
def test_a_pickle_that_declares_what_it_has_not(content: bytes, match: str | None) -> None:
    if match is None:
        assert load_restricted(content, {}, Path("x")) == {}
        return

    def refused() -> None:
        with pytest.raises(UserError, match=match):
            load_restricted(content, {}, Path("x"))

    assert growth(refused) < 16 * 1024**2


def test_a_compressed_record_is_not_unpacked(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    theirs(directory)
    bomb = directory / "__9_9.distcp"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(64 * 1024**2))

    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata["optimizer.param_groups.0.lr"] = BytesStorageMetadata()
        index = MetadataIndex("optimizer.param_groups.0.lr")
        metadata.storage_data[index] = _StorageInfo("__9_9.distcp", 0, bomb.stat().st_size)

    change(directory, edit)
    with pytest.raises(UserError, match="a record larger than itself"):
        convert(directory, tmp_path / "ours")


def test_state_by_position_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(UserError, match="positions instead of names"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_which_model_is_meant(tmp_path: Path) -> None:
    model = {"w": torch.ones(2)}
    dcp.save({"net": model, "ema": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(UserError, match=r"which tensors are the model's is not clear \(there are: net, ema\)"):
        convert(tmp_path / "two", tmp_path / "ours")
    dcp.save({"model": model, "ema": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path / "named", no_dist=True)
    with CheckpointReader(convert(tmp_path / "named", tmp_path / "ours")) as reader:
        into = torch.empty(2)
        box = whole((2,))
        assert box is not None
        reader.read_into("w", MASTER, box, into)
        assert torch.equal(into, torch.ones(2))


def test_what_is_refused_on_the_way_out(tmp_path: Path) -> None:
    state = small_state()
    path = Saver(tmp_path / "run").save(Contents(step=1), whole_fragments(state))
    for tool, world_size, match in (
        ("zero2", 2, "choose one of dcp, zero3"),
        ("zero3", None, "needs --world-size"),
        ("dcp", 2, "takes no --world-size"),
        ("zero3", 0, "at least one rank"),
        ("zero3", 2, "no optimizer groups"),
    ):
        with pytest.raises(UserError, match=match):
            convert_to(path, tmp_path / "out", tool, world_size)
    with pytest.raises(UserError, match="exists"):
        convert_to(path, tmp_path / "run", "dcp")
    other = OptimizerState(kinds=("momentum_buffer",))
    path = Saver(tmp_path / "sgd").save(Contents(step=1, optimizer=other), whole_fragments(state))
    with pytest.raises(UserError, match="keeps momentum_buffer: only AdamW's state"):
        convert_to(path, tmp_path / "out", "dcp")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "sgd"]
