"""What each layer minds is measured by itself, and widths are allotted by it; the bits are those on the disk."""

import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.compress.card import read_card
from shardlab.compress.packed import pack, stored_bits
from shardlab.compress.quantize import QuantizeConfig, quantize
from shardlab.compress.sensitivity import allot, measure
from shardlab.compress.stage import Rows
from shardlab.compress.walk import Walk
from shardlab.data.window import IGNORED
from shardlab.errors import UserError
from shardlab.model.grid import find_scales
from shardlab.model.schemes import Scheme, parse_scheme
from tests.compress.conftest import LENGTH

LAYERS = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "lm_head")


@pytest.mark.parametrize("name", ["int2g32", "int3g32", "int5", "int6g32", "int8", "w8a8"])
@pytest.mark.parametrize("inputs", [96, 64])
def test_bits_are_counted_as_they_are_stored(name: str, inputs: int) -> None:
    scheme, weight = parse_scheme(name), torch.randn(5, inputs)
    stored, _ = pack(weight, find_scales(weight, scheme.grid, torch.bfloat16), scheme, torch.bfloat16)
    assert stored_bits(scheme, 5, inputs) == sum(8 * one.numel() * one.element_size() for one in stored.values())


@pytest.mark.parametrize("tie", ["model", "tied"])
def test_a_trial_is_the_model_with_that_layer_alone_rounded(
    tie: str, rows: Rows, request: pytest.FixtureRequest
) -> None:
    """By hand: transformers runs both models whole."""
    directory: Path = request.getfixturevalue(tie)
    schemes = [parse_scheme("int3g32"), parse_scheme("int5")]
    walk = Walk(directory, [], [], sequence_length=LENGTH)
    batches = rows.calibration[:2]
    costs = measure(walk, dict.fromkeys(LAYERS, schemes), torch.bfloat16, batches)
    assert measure(walk, dict.fromkeys(LAYERS, schemes), torch.bfloat16, batches) == costs, "to the last bit"
    for layer, scheme in product(LAYERS, schemes):
        first, second = (AutoModelForCausalLM.from_pretrained(directory).eval() for _ in range(2))
        weight = second.get_parameter(f"{layer}.weight")
        scale = find_scales(weight.detach(), scheme.grid, torch.bfloat16)
        rounded = pack(weight.detach(), scale, scheme, torch.bfloat16)[1]
        second.get_submodule(layer).weight = nn.Parameter(rounded)  # a tied head becomes its own
        total, tokens = 0.0, 0
        for batch in batches:
            counted = batch["targets"] != IGNORED
            inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
            with torch.no_grad():
                before, after = (model(**inputs, use_cache=False).logits[counted] for model in (first, second))
            total += float(nn.functional.kl_div(after.log_softmax(-1), before.softmax(-1), reduction="sum"))
            tokens += int(counted.sum())
        assert costs[layer][scheme] == pytest.approx(total / tokens, rel=2e-3)


SHAPES = {"a": (8, 64), "b": (8, 64), "c": (16, 64)}
INT = {width: parse_scheme(f"int{width}g32") for width in (2, 3, 4, 8)}
COSTS = {
    "a": {INT[2]: 9.0, INT[3]: 2.0, INT[4]: 0.5, INT[8]: 0.1},
    "b": {INT[2]: 0.3, INT[3]: 0.4, INT[4]: 0.2, INT[8]: 0.0},  # three bits are worse than two
    "c": {INT[2]: 4.0, INT[3]: 1.0, INT[4]: 0.3, INT[8]: 0.0},
}


def spent(schemes: Mapping[str, Scheme]) -> float:
    weights = sum(rows * inputs for rows, inputs in SHAPES.values())
    return sum(stored_bits(scheme, *SHAPES[name]) for name, scheme in schemes.items()) / weights


@pytest.mark.parametrize("target", [2.8, 3.0, 3.6, 4.7, 5.0, 6.0, 9.0])
def test_an_allotment_keeps_the_bits_and_is_close_to_the_best_there_is(target: float) -> None:
    found = allot(COSTS, SHAPES, target, {})
    assert found.bits == pytest.approx(spent(found.schemes))
    assert found.bits <= target
    assert found.cost == pytest.approx(sum(COSTS[name][scheme] for name, scheme in found.schemes.items()))
    every = [dict(zip(SHAPES, chosen, strict=True)) for chosen in product(INT.values(), repeat=3)]
    best = min(sum(COSTS[n][s] for n, s in one.items()) for one in every if spent(one) <= target)
    worst = max(sum(COSTS[n][s] for n, s in one.items()) for one in every)
    assert found.cost - best <= 0.01 * (worst - best)


def test_what_a_rule_fixes_counts_and_too_few_bits_are_refused() -> None:
    others = {name: costs for name, costs in COSTS.items() if name != "c"}
    found = allot(others, SHAPES, 5.0, {"c": INT[4]})
    assert found.schemes["c"] == INT[4]
    assert found.bits == pytest.approx(spent(found.schemes))
    assert found.bits <= 5.0
    with pytest.raises(UserError, match=r"--target-bits 2: with these widths and groups the least is 2\.\d+"):
        allot(COSTS, SHAPES, 2.0, {})


def file_bits(directory: Path) -> float:
    """For a weight of the quantized layers, as they lie in the file."""
    tensors = load_file(directory / "model.safetensors")
    layers = [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")]
    bits = weights = 0
    for layer in layers:
        bits += sum(8 * tensors[f"{layer}_{s}"].nbytes for s in ("packed", "scale", "shape"))
        weights += int(tensors[f"{layer}_shape"].prod())
    return bits / weights


def test_a_target_is_kept_on_the_disk_and_beats_one_width_for_all(model: Path, rows: Rows, tmp_path: Path) -> None:
    """The same layers, measured on held-out rows; the whole table is in the card, and the same comes out again."""
    figures: dict[str, Any] = {}
    for name, config in {
        "mixed": QuantizeConfig(target_bits=4.8, group_size=32, method="rtn"),
        "again": QuantizeConfig(target_bits=4.8, group_size=32, method="rtn"),
        "uniform": QuantizeConfig("int4", group_size=32, method="rtn"),
    }.items():
        quantize(model, tmp_path / name, config, rows, LENGTH, lambda _: None)
        card = read_card(tmp_path / name)
        assert card is not None
        figures[name] = card["figures"]
        assert figures[name]["bits_per_weight"] == pytest.approx(file_bits(tmp_path / name))
    assert figures["mixed"] == figures["again"]
    assert 4.5 < figures["mixed"]["bits_per_weight"] <= 4.8
    assert figures["mixed"]["kl_divergence"] < figures["uniform"]["kl_divergence"]
    assert set(figures["mixed"]["sensitivity"]["model.layers.0.mlp.up_proj"]) == {
        f"int{width}g32" for width in (3, 4, 5, 6, 8)
    }
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("mixed", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rules_stand_and_contradictions_are_said(
    model: Path, rows: Rows, text: Path, tmp_path: Path, make_model: Callable[..., Path]
) -> None:
    local = ("*.layers.0.*=none", "*.1.mlp.down_proj=int8")
    config = QuantizeConfig(target_bits=6, group_size=32, local=local, widths=(4, 8))
    quantize(model, tmp_path / "out", config, rows, LENGTH, lambda _: None)
    card = read_card(tmp_path / "out")
    assert card is not None
    assert card["layers"]["model.layers.0.mlp.up_proj"] == "as it was: by its rule"
    assert card["layers"]["model.layers.1.mlp.down_proj"] == "int8g32"
    assert "model.layers.1.mlp.down_proj" not in card["figures"]["sensitivity"]
    with pytest.raises(UserError, match="leave no layer to allot"):
        quantize(model, tmp_path / "no", QuantizeConfig(target_bits=5, local=("*=int8",)), rows, LENGTH, print)
    with pytest.raises(UserError, match="widths of 2 to 8"):
        quantize(model, tmp_path / "no", QuantizeConfig(target_bits=5, widths=(4, 9)), rows, LENGTH, print)
    for arguments in (["--target-bits", "5", "--scheme", "int4"], ["--widths", "4"]):
        done = CliRunner().invoke(app, ["quantize", str(model), str(tmp_path / "no"), *arguments])
        assert isinstance(done.exception, UserError)
    arguments = ["--target-bits", "5", "--group-size", "32", "--widths", "4", "--widths", "8", "--files", str(text)]
    arguments += ["--calibration", "4", "--held-out", "4", "--json"]
    done = CliRunner().invoke(app, ["quantize", str(model), str(tmp_path / "by-command"), *arguments])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["bits_per_weight"] <= 5
