"""Foreign directories: model directories come in, and hostile ones are refused and nothing in them is run."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardlab.checkpoint import read_manifest, verify
from shardlab.checkpoint.convert import convert
from shardlab.checkpoint.export import export
from shardlab.cli import app
from shardlab.errors import UserError
from tests.checkpoint.support import same


def model_directory(directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(4).bfloat16()}
    for number, (name, value) in enumerate(tensors.items()):
        save_file({name: value}, directory / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "modeling.py").write_text("raise SystemExit")
    return tensors


def test_a_model_directory_and_back(tmp_path: Path) -> None:
    tensors = model_directory(tmp_path / "model")
    done = CliRunner().invoke(app, ["checkpoint", "convert", str(tmp_path / "model"), str(tmp_path / "ours")])
    path = tmp_path / "ours" / "step-00000000"
    assert done.stdout == f"checkpoint: {path}\n"
    assert [entry.name for entry in verify(path).attachments] == ["config.json"]
    assert read_manifest(path).parent == str(tmp_path / "model")
    export(path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same(value, found[name]) for name, value in tensors.items())


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "optimizer.pt", "missing.safetensors", 3])
def test_an_index_that_leads_away(tmp_path: Path, name: object) -> None:
    model_directory(tmp_path / "model")
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"no plain name|is missing"):
        convert(tmp_path / "model", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        convert(tmp_path / "nothing", tmp_path / "ours")
    model_directory(tmp_path / "model")
    with pytest.raises(UserError, match="not empty"):
        convert(tmp_path / "model", tmp_path)
    (tmp_path / "model" / "model-0.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match=r"model-0\.safetensors is damaged"):
        convert(tmp_path / "model", tmp_path / "ours")
    (tmp_path / "model" / "model-0.safetensors").unlink()
    (tmp_path / "model" / "model-0.safetensors").symlink_to(tmp_path / "model" / "model-1.safetensors")
    with pytest.raises(UserError, match="is a link"):
        convert(tmp_path / "model", tmp_path / "ours")


class _Marker:
    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("saved_by", ["torch", "pickle"])
def test_a_pickle_in_deepspeeds_place_is_never_run(tmp_path: Path, saved_by: str) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3240"""
    directory = tmp_path / "zero" / "global_step1"
    directory.mkdir(parents=True)
    (tmp_path / "zero" / "latest").write_text("global_step1")
    file = directory / "mp_rank_00_model_states.pt"
    marker = tmp_path / "marker"
    if saved_by == "torch":
        torch.save({"module": _Marker(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(_Marker(marker)))
    with pytest.raises(UserError, match=r"mp_rank_00_model_states\.pt") as raised:
        convert(tmp_path / "zero", tmp_path / "ours")
    assert "\n" not in str(raised.value)
    assert not marker.exists()


@pytest.mark.parametrize("tag", ["../elsewhere", "/tmp", "missing", ""])
def test_a_tag_that_leads_away(tmp_path: Path, tag: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "latest").write_text(tag)
    with pytest.raises(UserError, match="latest names"):
        convert(tmp_path / "zero", tmp_path / "ours")


def test_a_file_of_another_layout(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.zeros(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match=r"no checkpoint of DeepSpeed that can be read: KeyError\('global_steps'\)"):
        convert(tmp_path, tmp_path / "ours")


def stage_0(directory: Path, groups: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A file as stage 0 writes it: the module and torch's own optimizer state."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters}] if groups == 1 else [{"params": [p]} for p in parameters])
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"module": module.state_dict(), "buffer_names": [], "optimizer": optimizer.state_dict(), "global_steps": 1}
    directory.mkdir()
    torch.save(state, directory / "mp_rank_00_model_states.pt")
    return module, optimizer


def test_stage_0(tmp_path: Path) -> None:
    module, _ = stage_0(tmp_path / "zero", groups=1)
    manifest = verify(convert(tmp_path / "zero", tmp_path / "ours"))
    assert {(entry.name, entry.kind) for entry in manifest.tensors} == {
        (name, kind) for name, _ in module.named_parameters() for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    assert manifest.optimizer.scalars["0.weight"] == {"step": 1.0}
    stage_0(tmp_path / "groups", groups=4)
    with pytest.raises(UserError, match="positions instead of names"):
        convert(tmp_path / "groups", tmp_path / "other")
