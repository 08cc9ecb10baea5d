"""One model in each format: the same text, the same tokens, the same figures but for what a dtype costs; and speed."""

import json
from pathlib import Path

import pytest

from shardlab.compress.card import read_card
from shardlab.errors import UserError
from shardlab.export.artifact import compare_artifacts, evaluate_artifact, kind_of
from shardlab.export.gguf import export_gguf
from shardlab.export.onnx import export_onnx
from shardlab.export.onnx_weights import parse_onnx_dtype
from shardlab.export.speed import SpeedConfig, measure_speed
from shardlab.recipe import DataSection
from tests.export.models import TEXT, bpe_tokenizer, needs, save_model
from tests.train.support import shardlab


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory, and what is exported from it in dtypes that cost nothing (and one that does)."""
    needs("gguf", "cyllama", "onnx", "onnxscript", "onnxruntime")
    root = tmp_path_factory.mktemp("formats")
    save_model(root / "model", "qwen2", bpe_tokenizer(280), 320)
    export_gguf(root / "model", root / "model.gguf", "f32")
    export_onnx(root / "model", root / "onnx", parse_onnx_dtype("fp32"))
    export_onnx(root / "model", root / "int4", parse_onnx_dtype("int4"))
    return {"hf": root / "model", "gguf": root / "model.gguf", "onnx": root / "onnx", "int4": root / "int4"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents and long ones: some rows hold several, some a part of one."""
    directory = tmp_path_factory.mktemp("held-out")
    for number in range(12):
        (directory / f"{number}.txt").write_text(f"{number}: {TEXT * (1 + number % 3)}", encoding="utf-8")
    return directory


def section(text: Path, packing: bool = True) -> DataSection:
    files = (str(text / "*.txt"),)
    return DataSection(files=files, evaluation_files=files, sequence_length=48, packing=packing)


@pytest.mark.parametrize("packing", [True, False])
def test_all_formats_are_judged_on_the_same_tokens(formats: dict[str, Path], text: Path, packing: bool) -> None:
    found = {name: evaluate_artifact(path, section(text, packing)) for name, path in formats.items()}
    assert {each["tokens"] for each in found.values()} == {found["hf"]["tokens"]}
    assert found["onnx"]["loss"] == pytest.approx(found["hf"]["loss"], abs=1e-5)
    assert found["gguf"]["loss"] == pytest.approx(found["hf"]["loss"], abs=2e-2)  # its cache is f16
    assert abs(found["int4"]["loss"] - found["hf"]["loss"]) > 1e-4


def test_what_each_format_has_lost(formats: dict[str, Path], text: Path) -> None:
    data = section(text)
    lost = {name: compare_artifacts(formats["hf"], path, data) for name, path in formats.items()}
    assert lost["hf"].divergence == 0
    assert lost["onnx"].divergence < 1e-9
    assert lost["gguf"].divergence < 1e-3
    assert lost["int4"].divergence > 10 * lost["gguf"].divergence
    back = compare_artifacts(formats["gguf"], formats["onnx"], data)
    assert (back.loss_before, back.loss_after) == (lost["gguf"].loss_after, pytest.approx(lost["onnx"].loss_after))


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("name", ["hf", "gguf", "onnx"])
def test_speed(name: str, formats: dict[str, Path]) -> None:
    speed = measure_speed(formats[name], SpeedConfig(prompt_tokens=16, new_tokens=4, repeats=2, threads=1))
    assert speed.runtime == {"hf": "hf float32", "gguf": "gguf", "onnx": "onnx"}[name]
    assert speed.prefill_tokens_per_second > 0  # how they compare is the machine's affair
    assert speed.decode_tokens_per_second > 0
    assert 0 < speed.peak_bytes < 2**30
    assert speed.threads == 1
    assert speed.file_bytes > 4 * 280 * 64


@pytest.mark.usefixtures("preloaded")
def test_what_is_no_artifact(formats: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such model"):
        kind_of(tmp_path / "none")
    (tmp_path / "text").write_text("x")
    with pytest.raises(UserError, match="neither a model directory nor a GGUF file"):
        kind_of(tmp_path / "text")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match=r"model\.gguf is damaged"):
        measure_speed(tmp_path / "model.gguf", SpeedConfig(4, 1, 1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    with pytest.raises(UserError, match=r"the speed of .*empty can't be measured: "):
        measure_speed(tmp_path / "empty", SpeedConfig(4, 1, 1))
    for path in (formats["gguf"], formats["onnx"]):
        with pytest.raises(UserError, match="has 64 positions: give --sequence-length 64 or less"):
            evaluate_artifact(path, DataSection(sequence_length=65))


@pytest.mark.usefixtures("preloaded")
def test_the_commands(formats: dict[str, Path], text: Path, tmp_path: Path) -> None:
    given = ["--files", str(text / "*.txt"), "--sequence-length", "32"]
    times = ["--speed", "--prompt-tokens", "8", "--new-tokens", "2", "--threads", "1"]
    done = shardlab("eval", str(formats["gguf"]), "--compare", str(formats["hf"]), *given, *times, "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures["speed"]["after"]["runtime"] == "gguf"
    assert figures["speed"]["decode_speedup"] > 0
    assert figures["top_token_agreement"] > 0.9
    alone = shardlab("eval", str(formats["onnx"]), *given)
    assert alone.code == 0, alone.err
    assert alone.out.startswith("loss ")
    out = tmp_path / "bf16"
    done = shardlab("export", str(formats["hf"]), str(out), "--to", "hf", "--speed", "--threads", "1")
    assert done.code == 0, done.err
    assert "times as fast" in done.out
    card = read_card(out)
    assert card is not None
    assert card["figures"]["speed"]["after"]["runtime"] == "hf bfloat16"
