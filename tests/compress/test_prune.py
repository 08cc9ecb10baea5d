"""A pruned directory: loads by the plain class, holds the zeros it states, and is smaller where channels went."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.compress.card import read_card
from shardlab.compress.prune import PruneConfig, prune
from shardlab.compress.quantize import QuantizeConfig, quantize
from shardlab.compress.stage import Rows
from shardlab.errors import UserError
from shardlab.state.masks import Masks
from tests.compress.conftest import LENGTH
from tests.compress.test_quantize import perplexity


def whole_masks(directory: Path) -> dict[str, torch.Tensor]:
    """Which weights stay, as the directory says it."""
    masks, shapes = Masks.read(directory), load_file(directory / "model.safetensors")
    return {name: masks.stays(name, tuple(shapes[name].shape)) for name in masks}


def run(source: Path, output: Path, rows: Rows, **values: object) -> dict[str, object]:
    prune(source, output, PruneConfig(**values), rows, LENGTH, lambda _: None)  # type: ignore[arg-type]
    card = read_card(output)
    assert card is not None
    return card


@pytest.mark.parametrize(
    "values",
    [
        {"method": "sparsegpt", "sparsity": 0.5},
        {"method": "sparsegpt", "pattern": "2:4"},
        {"method": "wanda", "sparsity": 0.5},
        {"method": "magnitude", "sparsity": 0.3, "ignore": ("*.layers.0.*",)},
    ],
    ids=lambda values: "-".join(str(value) for value in values.values()),
)
def test_zeros_are_those_of_the_masks_and_the_figures_those_of_what_loads(
    values: dict[str, object], model: Path, rows: Rows, tmp_path: Path
) -> None:
    """Field case B60: https://github.com/IST-DASLab/sparsegpt/issues/17, https://github.com/WalterSimoncini/SnapViT/issues/1."""
    card = run(model, tmp_path / "out", rows, **values)
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert before.keys() == after.keys()
    masks = whole_masks(tmp_path / "out")
    assert len(masks) == (7 if "ignore" in values else 14)
    zeros = sum(int((after[name] == 0).sum()) for name in masks)
    stated = card["figures"]["pruned_weights"]  # type: ignore[index]
    assert zeros == stated == sum(int((~mask).sum()) for mask in masks.values())
    wanted = values.get("sparsity", 0.5)
    assert card["figures"]["sparsity"] == pytest.approx(wanted, abs=0.005)  # type: ignore[index]
    assert all(torch.equal(before[name], after[name]) for name in before if name not in masks)
    assert perplexity(tmp_path / "out", rows) == pytest.approx(card["figures"]["perplexity"]["after"], rel=1e-5)  # type: ignore[index]


def test_sparsegpt_costs_less_than_magnitude(model: Path, rows: Rows, tmp_path: Path) -> None:
    costs = {
        method: run(model, tmp_path / method, rows, method=method, sparsity=0.5)["figures"]["kl_divergence"]  # type: ignore[index]
        for method in ("sparsegpt", "magnitude")
    }
    assert costs["sparsegpt"] < 0.9 * costs["magnitude"]


def test_channels_that_go_make_the_plain_model_smaller(model: Path, rows: Rows, tmp_path: Path) -> None:
    """https://github.com/CASIA-LMC-Lab/FLAP/issues/7: shapes that disagree with the config load nowhere."""
    card = run(model, tmp_path / "out", rows, method="channels", sparsity=0.5)
    assert AutoConfig.from_pretrained(tmp_path / "out").intermediate_size == 48
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert loaded.model.layers[1].mlp.down_proj.weight.shape == (64, 48)
    assert perplexity(tmp_path / "out", rows) == pytest.approx(card["figures"]["perplexity"]["after"], rel=1e-5)  # type: ignore[index]
    size = card["figures"]["weight_bytes"]  # type: ignore[index]
    assert size["before"] - size["after"] == pytest.approx(2 * 3 * 48 * 64 * 4, rel=0.01)


def test_channels_that_nothing_uses_cost_nothing(model: Path, rows: Rows, tmp_path: Path) -> None:
    """The logits are those of the model in which the channels were zero."""
    zeroed = AutoModelForCausalLM.from_pretrained(model)
    for layer in zeroed.model.layers:
        layer.mlp.up_proj.weight.data[::2] = 0.0
    zeroed.save_pretrained(tmp_path / "in")
    for path in model.glob("tokenizer*"):
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    run(tmp_path / "in", tmp_path / "out", rows, method="channels", sparsity=0.5)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        got, wanted = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
            for path in (tmp_path / "out", tmp_path / "in")
        )
    assert float((got - wanted).abs().max()) < 1e-5


def test_what_was_pruned_stays_pruned_when_it_is_quantized(model: Path, rows: Rows, tmp_path: Path) -> None:
    run(model, tmp_path / "sparse", rows, pattern="2:4")
    quantize(tmp_path / "sparse", tmp_path / "out", QuantizeConfig("int4", group_size=32), rows, LENGTH, lambda _: None)
    masks = whole_masks(tmp_path / "sparse")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    loaded(torch.arange(4)[None])  # what is packed is unpacked by the first call
    weights = dict(loaded.named_parameters())
    assert all(bool((weights[name][~mask] == 0).all()) for name, mask in masks.items())
    card = read_card(tmp_path / "out")
    assert card is not None
    assert [stage["stage"] for stage in card["lineage"]] == ["prune"]


def test_what_can_not_be_done_is_said_at_once(model: Path, rows: Rows, tmp_path: Path) -> None:
    for values, message in (
        ({"sparsity": 0.5, "method": "best"}, "--method best"),
        ({}, "--sparsity, such as"),
        ({"pattern": "5:7"}, r"--pattern 5:7 doesn't divide model\.layers\.0\.self_attn\.q_proj \(64 inputs\)"),
        ({"sparsity": 0.5, "ignore": ("*.norm",)}, r"'\*\.norm' matches no layer"),
        ({"sparsity": 0.5, "ignore": ("*",)}, "leaves no layer"),
        ({"method": "channels", "pattern": "2:4"}, "takes --sparsity or --keep"),
        ({"method": "channels", "sparsity": 0.99}, "would leave 0 of 96"),
        ({"sparsity": 0.5, "dtype": "int8"}, "--dtype int8"),
    ):
        with pytest.raises(UserError, match=message):
            run(model, tmp_path / "out", rows, **values)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
