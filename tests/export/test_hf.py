"""The same model in another dtype: every value the cast one, and a plain load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.errors import UserError
from shardlab.export.hf import export_hf
from tests.export.models import bpe_tokenizer, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "in"
    save_model(directory, "llama-tied-biased", bpe_tokenizer(280), 320)
    return directory


@pytest.mark.parametrize(("dtype", "wanted"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_every_tensor_is_the_cast_one(dtype: str, wanted: torch.dtype, model: Path, tmp_path: Path) -> None:
    done = export_hf(model, tmp_path / "out", dtype)
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].to(wanted), after[name]) for name in before)
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == wanted
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert loaded.dtype == wanted
    assert not info["missing_keys"]
    assert done.after == pytest.approx(done.before / 2, rel=0.05)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_values_that_do_not_fit_are_named_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    large = AutoModelForCausalLM.from_pretrained(model)
    large.model.layers[1].mlp.up_proj.weight.data[2, 2] = 1e6
    large.save_pretrained(tmp_path / "in")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values up to 1e\+06"):
        export_hf(tmp_path / "in", tmp_path / "out", "fp16")
    with pytest.raises(UserError, match="--dtype q8_0"):
        export_hf(model, tmp_path / "out", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
