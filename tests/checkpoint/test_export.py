"""The directory that an export writes: types, shards, files beside the weights, and what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shardlab.checkpoint import Contents, Saver, verify
from shardlab.checkpoint.export import export
from shardlab.cli import app
from shardlab.errors import UserError
from shardlab.state.fragment import BUFFER, FROZEN, MASTER
from tests.checkpoint.support import same, whole_fragments

STATE = {
    ("a", MASTER): torch.randn(50, 30).t(),
    ("a", "exp_avg"): torch.randn(30, 50),
    ("b", MASTER): torch.randn(7),
    ("frozen", FROZEN): torch.randn(5).bfloat16(),
    ("count", BUFFER): torch.tensor([2**40]),
    ("scalar", MASTER): torch.tensor(1.5),
}
ATTACHMENTS = {"config.json": b'{"model_type": "llama", "torch_dtype": "float16"}', "tokenizer.json": b"{}"}


def saved(root: Path, **attachments: bytes) -> Path:
    contents = Contents(
        step=1,
        attachments=attachments or ATTACHMENTS,
        recipe={"train": {"precision": "bf16"}},
    )
    return Saver(root).save(contents, whole_fragments(STATE))


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("fp32", torch.float32)])
def test_floats_are_converted_and_nothing_else(tmp_path: Path, asked: str, dtype: torch.dtype) -> None:
    export(saved(tmp_path), tmp_path / "out", asked)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"a", "b", "frozen", "count", "scalar"}
    for (name, kind), value in STATE.items():
        if kind != "exp_avg":
            assert same(found[name], value.to(dtype) if value.is_floating_point() else value), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": str(dtype).removeprefix("torch.")}


def test_shards_have_an_index(tmp_path: Path) -> None:
    export(saved(tmp_path), tmp_path / "out", "fp32", shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6000 + 28 + 20 + 8 + 4
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)


def test_config_and_tokenizer_of_a_directory_like_it(tmp_path: Path) -> None:
    path = saved(tmp_path, **{"tokenizer.json": b"{}"})
    with pytest.raises(UserError, match=r"holds no config\.json: give --like DIR"):
        export(path, tmp_path / "out")
    assert not [name for name in os.listdir(tmp_path) if "out" in name]
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text('{"model_type": "gpt2"}')
    (like / "vocab.txt").write_text("a")
    (like / "model.safetensors").write_text("weights of another model")
    (like / "pytorch_model.bin").write_text("and a pickle")
    arguments = ["checkpoint", "export", str(path), str(tmp_path / "out"), "--like", str(like), "--dtype", "fp32"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "vocab.txt"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"


def test_what_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(UserError, match="never overwritten"):
        export(path, tmp_path)
    done = CliRunner().invoke(app, ["checkpoint", "export", str(path), str(tmp_path / "out"), "--dtype", "int3"])
    assert isinstance(done.exception, UserError)
    assert "choose one of auto, bf16, fp32" in str(done.exception)
    (path / "config.json").write_bytes(b"{" + ATTACHMENTS["config.json"][1:-1] + b" ")
    with pytest.raises(UserError, match=r"config\.json: its content is not what was written"):
        export(path, tmp_path / "out")
    (path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing"):
        verify(path)
    with pytest.raises(RuntimeError, match="is not a name that an attachment may have"):
        saved(tmp_path / "other", **{"modeling.py": b"run()"})
    with pytest.raises(UserError, match=r"config\.json of the model is not JSON"):
        export(saved(tmp_path / "third", **{"config.json": b"{"}), tmp_path / "out")
