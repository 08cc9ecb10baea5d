"""ONNX: what onnxruntime makes of the directory, at shapes that were not traced; what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardlab.errors import UserError
from shardlab.export import onnx as onnx_export
from shardlab.export import onnx_graph
from shardlab.export.gguf_check import ExportCheckError
from shardlab.export.onnx import BOUNDS, export_onnx
from shardlab.export.onnx_runtime import FILE, OnnxModel
from shardlab.export.onnx_weights import parse_onnx_dtype
from tests.export.models import CONFIGS, bpe_tokenizer, needs, save_model
from tests.train.support import shardlab


@pytest.fixture(autouse=True)
def _libraries() -> None:
    needs("onnx", "onnxscript", "onnxruntime")


def export(model: Path, output: Path, dtype: str) -> onnx_export.OnnxExport:
    return export_onnx(model, output, parse_onnx_dtype(dtype))


@pytest.mark.parametrize("name", ["llama-tied-biased", "llama3-rope", "mistral", "qwen2", "qwen3", "gpt2"])
def test_onnxruntime_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Field case B68, https://github.com/huggingface/optimum/issues/449: compared at shapes that were not traced."""
    save_model(tmp_path / "model", name, bpe_tokenizer(280), 320)
    done = export(tmp_path / "model", tmp_path / "out", "fp32")
    assert done.agreement.error < 2e-6
    assert done.agreement.same_token == 1
    assert onnx_graph.TRACED[:2] not in done.shapes
    if name == "mistral":
        assert max(length for _, length in done.shapes) > CONFIGS[name][1]["sliding_window"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    # A tied matrix is there once.
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "model").parameters())
    assert 4 * weights < done.bytes < 4 * weights + 120_000


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-tied-biased", "int8"),
        ("llama-tied-biased", "int4"),
        ("qwen3", "int8g32"),
        ("gpt2", "int8"),
        ("gpt2", "int4"),
    ],
)
def test_fewer_bits_against_the_file_s_weights_and_the_original(name: str, dtype: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", name, bpe_tokenizer(280), 320)
    done = export(tmp_path / "model", tmp_path / "out", dtype)
    layers = sum(isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D" for m in model.modules())
    assert (done.rounded, done.wider) == (layers, ())
    assert 0 < done.agreement.error <= BOUNDS[parse_onnx_dtype(dtype).name.removesuffix("32")]
    tokens = list(range(3, 43))
    runtime = OnnxModel(tmp_path / "out")
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    error = np.linalg.norm(runtime.logits(tokens) - wanted) / np.linalg.norm(wanted)
    assert error < {"int8": 6e-2, "int8g32": 4e-2, "int4": 0.3}[dtype]
    # Token by token it says the same, but for inputs rounded by another scale.
    runtime.forget()
    alone = np.stack([runtime.extend([token], place) for place, token in enumerate(tokens)])
    assert np.linalg.norm(alone - wanted) / np.linalg.norm(wanted) < {"int8": 6e-2, "int8g32": 4e-2, "int4": 0.3}[dtype]
    runtime.close()


def test_bytes_of_the_weights(tmp_path: Path) -> None:
    """5 bits a weight: 4 and a fp32 scale for 32. The embedding 8 and a scale for a row."""
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320, hidden_size=256, intermediate_size=512)
    sizes = {dtype: export(tmp_path / "model", tmp_path / dtype, dtype).bytes for dtype in ("fp32", "int8", "int4")}
    layers = 2 * (256 * 256 * 3 + 3 * 256 * 512) + 320 * 256
    assert sizes["int4"] - layers * 5 / 8 - 320 * 260 < 60_000
    assert sizes["int8"] - layers - 320 * 260 < 80_000
    assert sizes["fp32"] > 4 * layers


def test_a_failed_check_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case B68: the exporter is made to fix what the first traced run saw: positions that don't go on."""
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    whole = onnx_graph._Flat.forward

    def wrong(self, input_ids, attention_mask, position_ids, states):  # type: ignore[no-untyped-def]
        return whole(self, input_ids, attention_mask, position_ids * 0, states)

    monkeypatch.setattr(onnx_graph._Flat, "forward", wrong)
    with pytest.raises(ExportCheckError, match="onnxruntime's logits are"):
        export(tmp_path / "model", tmp_path / "out", "fp32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_of_this_machine_is_in_the_file(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    export(tmp_path / "model", tmp_path / "out", "fp32")
    data = (tmp_path / "out" / FILE).read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in data
    assert b".py" not in data


def test_layers_that_groups_do_not_divide_stay_and_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320, intermediate_size=80)
    done = export(tmp_path / "model", tmp_path / "out", "int4")
    assert done.wider == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert "fp32 still, groups don't divide their inputs: 2" in done.text()


def test_the_command(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2", bpe_tokenizer(280), 320)
    output = tmp_path / "out"
    done = shardlab("export", str(tmp_path / "model"), str(output), "--to", "onnx", "--dtype", "int8")
    assert done.code == 0, done.err
    assert "onnxruntime beside transformers: logits" in done.out
    assert (output / "tokenizer.json").is_file()
    again = shardlab("export", str(tmp_path / "model"), str(output), "--to", "onnx")
    assert again.code == 2
    assert "never overwritten" in again.err


def test_unknown_dtypes_are_refused() -> None:
    for text in ("int3", "int4g48", "q8_0"):
        with pytest.raises(UserError, match="choose fp32, int8, int4"):
            parse_onnx_dtype(text)
