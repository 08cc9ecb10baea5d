"""`shardlab checkpoint export`: what a checkpoint gives is what the run saved as its model, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.train.support import TINY, shardlab, write_recipe


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_exported_checkpoint_is_the_runs_model(tmp_path: Path, precision: str) -> None:
    recipe = write_recipe(tmp_path, train={"steps": 2, "precision": precision}, checkpoint={"every": 2})
    run, output = tmp_path / "run", tmp_path / "exported"
    assert shardlab("train", recipe, "--output", run).code == 0
    ended = shardlab("checkpoint", "export", run, output)
    assert ended.code == 0, ended.err
    assert ended.out == f"model: {output}\n"
    expected, found = (load_file(place / "model.safetensors") for place in (run / "model", output))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    names = {path.name for path in (run / "model").iterdir()}
    assert {path.name for path in output.iterdir()} == names
    assert json.loads((output / "config.json").read_text()) == json.loads((run / "model" / "config.json").read_text())
    model, report = AutoModelForCausalLM.from_pretrained(output, dtype="auto", output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    AutoTokenizer.from_pretrained(output)


def test_of_adapters_an_adapter_directory_is_exported(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, "vocab_size": 320})).save_pretrained(
        tmp_path / "base"
    )
    recipe = write_recipe(
        tmp_path,
        model={"path": str(tmp_path / "base"), "lora": {"rank": 2, "targets": ["q_proj"]}},
        train={"steps": 2},
        checkpoint={"every": 2},
    )
    run, output = tmp_path / "run", tmp_path / "exported"
    assert shardlab("train", recipe, "--output", run).code == 0
    assert shardlab("checkpoint", "export", run, output).code == 0
    expected, found = (load_file(place / "adapter_model.safetensors") for place in (run / "model", output))
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    configs = [json.loads((place / "adapter_config.json").read_text()) for place in (run / "model", output)]
    assert configs[0] == configs[1]
