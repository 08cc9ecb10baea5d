"""A quantized directory: what is in it, what loads it, and that the figures are those of what loads."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.compress.card import read_card
from shardlab.compress.quantize import QuantizeConfig, quantize
from shardlab.compress.stage import Rows
from shardlab.data.window import IGNORED
from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.recipe import DataSection, ModelSection
from shardlab.train.evaluate import evaluate_directory
from tests.compress.conftest import LENGTH


def run(source: Path, output: Path, rows: Rows, **values: object) -> dict[str, object]:
    quantize(source, output, QuantizeConfig(**values), rows, LENGTH, lambda _: None)  # type: ignore[arg-type]
    card = read_card(output)
    assert card is not None
    return card


def perplexity(directory: Path, rows: Rows) -> float:
    """By transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in rows.held_out:
            inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
            logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
            targets = batch["targets"].flatten()
            counted = targets != IGNORED
            total += cross_entropy(logits[counted], targets[counted], reduction="sum").item()
            tokens += int(counted.sum())
    return math.exp(total / tokens)


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": "int4", "group_size": 32},
        {"scheme": "int3", "group_size": 16, "method": "rtn"},
        {"scheme": "int8", "head": True, "dtype": "fp32"},
        {"scheme": "w8a8", "head": True},
        {"scheme": "int4", "group_size": 32, "local": ("*.down_proj=int8", "*.layers.0.*=none")},
    ],
    ids=["int4", "int3-rtn", "head", "w8a8", "local"],
)
def test_the_cards_perplexity_is_that_of_the_model_that_loads(
    values: dict[str, object], model: Path, rows: Rows, tmp_path: Path
) -> None:
    card = run(model, tmp_path / "out", rows, **values)
    figures = card["figures"]
    assert perplexity(model, rows) == pytest.approx(figures["perplexity"]["before"], rel=1e-5)  # type: ignore[index]
    assert perplexity(tmp_path / "out", rows) == pytest.approx(figures["perplexity"]["after"], rel=1e-4)  # type: ignore[index]


def test_gptq_costs_less_than_rounding_to_nearest(model: Path, rows: Rows, tmp_path: Path) -> None:
    cards = {
        method: run(model, tmp_path / method, rows, scheme="int3", group_size=32, method=method)["figures"]
        for method in ("gptq", "rtn")
    }
    assert cards["gptq"]["kl_divergence"] < 0.9 * cards["rtn"]["kl_divergence"]  # type: ignore[index]


def test_a_new_process_reads_the_same_logits(model: Path, rows: Rows, tmp_path: Path) -> None:
    """Field case B64: bit for bit, twice; and none of them is a fresh weight."""
    run(model, tmp_path / "out", rows, scheme="int4", group_size=32)
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        "m, info = A.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True);"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info;"
        "torch.manual_seed(0); torch.set_num_threads(1);"
        "torch.save(m.eval()(torch.arange(40)[None], use_cache=False).logits, sys.argv[2])"
    )
    for name in ("a.pt", "b.pt"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / name)], check=True)
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert torch.equal(first, second)


def test_bytes_on_disk(model: Path, rows: Rows, tmp_path: Path) -> None:
    """int4 takes four bits and its scales: no byte a weight, no copy in full precision."""
    figures = run(model, tmp_path / "out", rows, scheme="int4", group_size=32)["figures"]
    linear = outside = 0
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            count = math.prod(file.get_slice(name).get_shape())
            if "_proj" in name:
                linear += count
            else:
                outside += count
    layers = 14
    expected = linear * 4.5 / 8 + 2 * outside + layers * 16  # and each layer's shape
    header = 8192
    assert expected <= figures["weight_bytes"]["after"] <= expected + header  # type: ignore[index]


@pytest.mark.parametrize(("scheme", "share"), [("int8", 0.35), ("w8a8", 0.35), ("int4", 0.2)])
def test_no_plain_load_takes_it_for_full_precision(
    scheme: str, share: float, model: Path, rows: Rows, tmp_path: Path
) -> None:
    """Field case B64, https://github.com/huggingface/transformers/issues/7923: fresh weights of full size."""
    run(model, tmp_path / "out", rows, scheme=scheme, group_size=32 if scheme == "int4" else None, method="rtn")
    before, after = (load_file(directory / "model.safetensors") for directory in (model, tmp_path / "out"))
    whole, less = (sum(t.nbytes for name, t in file.items() if "_proj" in name) for file in (before, after))
    assert less <= share * whole
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    plain.load_state_dict(before)
    with pytest.raises(RuntimeError, match=r"_proj\.weight"):
        plain.load_state_dict(after)


def test_a_tied_head_stays_tied_unless_asked(tied: Path, rows: Rows, tmp_path: Path) -> None:
    """Field case B63, https://github.com/huggingface/transformers/pull/37905: one side quantized, in silence."""
    card = run(tied, tmp_path / "kept", rows, scheme="int8")
    config = AutoConfig.from_pretrained(tmp_path / "kept")
    assert config.tie_word_embeddings
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "kept", dtype=torch.float32)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert perplexity(tmp_path / "kept", rows) == pytest.approx(card["figures"]["perplexity"]["after"], rel=1e-4)  # type: ignore[index]

    said: list[str] = []
    quantize(tied, tmp_path / "untied", QuantizeConfig(scheme="int8", head=True), rows, LENGTH, said.append)
    assert any("320 x 64 more weights" in line for line in said)
    assert not AutoConfig.from_pretrained(tmp_path / "untied").tie_word_embeddings
    after = read_card(tmp_path / "untied")
    assert after is not None
    assert perplexity(tmp_path / "untied", rows) == pytest.approx(after["figures"]["perplexity"]["after"], rel=1e-4)


def test_int8_inputs_are_in_the_config(model: Path, rows: Rows, tmp_path: Path) -> None:
    run(model, tmp_path / "out", rows, scheme="w8a8")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = section["config_groups"].values()
    assert group["input_activations"]["dynamic"] is True
    assert section["format"] == "int-quantized"


def test_eval_runs_it_and_training_refuses_it(model: Path, text: Path, rows: Rows, tmp_path: Path) -> None:
    card = run(model, tmp_path / "out", rows, scheme="w8a8")
    data = DataSection(files=(str(text),), tokenizer=str(model), sequence_length=LENGTH, evaluation_fraction=0.2)
    whole = evaluate_directory(tmp_path / "out", data)
    assert whole["tokens"] > card["figures"]["held_out_tokens"] / 2  # type: ignore[index]
    assert whole["perplexity"] == pytest.approx(card["figures"]["perplexity"]["after"], rel=0.1)  # type: ignore[index]
    with pytest.raises(UserError, match=r"is quantized \(compressed-tensors\): its weights can't be trained"):
        build_model(
            ModelSection(path=str(tmp_path / "out")), vocabulary=10, eos_token_id=None, sequence_length=8, seed=0
        )


def test_what_can_not_be_done_is_said_at_once(model: Path, rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj \(96 inputs\)"):
        run(model, tmp_path / "out", rows, scheme="int4", group_size=64)
    with pytest.raises(UserError, match="--method best"):
        run(model, tmp_path / "out", rows, method="best")
    run(model, tmp_path / "once", rows, scheme="int8", method="rtn")
    with pytest.raises(UserError, match="is quantized already"):
        run(tmp_path / "once", tmp_path / "out", rows)
    with pytest.raises(UserError, match="never overwritten"):
        run(model, tmp_path / "once", rows, scheme="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_weights_that_are_not_finite_are_named(model: Path, rows: Rows, tmp_path: Path) -> None:
    damaged = AutoModelForCausalLM.from_pretrained(model)
    damaged.model.layers[1].mlp.up_proj.weight.data[3, 3] = math.nan
    damaged.save_pretrained(tmp_path / "in")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are not finite"):
        run(tmp_path / "in", tmp_path / "out", rows, scheme="int8")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
