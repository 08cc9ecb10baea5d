"""Parts that go: the plain class loads what is left, smaller, and gives what the model gave without them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from shardlab.compress.layers import config_of_layers, largest, renumbered
from shardlab.compress.prune import PruneConfig, prune
from shardlab.compress.stage import Rows
from shardlab.compress.units import averaged_heads
from shardlab.errors import UserError
from shardlab.state.masks import Masks
from tests.compress.conftest import LENGTH
from tests.compress.test_prune import run
from tests.compress.test_quantize import perplexity

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


def logits(model: Path | Any) -> Tensor:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(60).reshape(2, 30), use_cache=False).logits
    return found


def family(model: Path, directory: Path, kind: str, **values: Any) -> Path:
    """A model directory of another family, with the same tokenizer."""
    shared = AutoConfig.from_pretrained(model).to_dict()
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "initializer_range",
    )
    config: PretrainedConfig = AutoConfig.for_model(kind, **{key: shared[key] for key in keys} | values)
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for path in model.glob("tokenizer*"):
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.fixture(scope="module")
def mixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(model, tmp_path_factory.mktemp("mixture"), "mixtral", **EXPERTS)


@pytest.mark.parametrize("by", ["influence", "activation", "magnitude"])
@pytest.mark.parametrize("method", ["channels", "groups", "layers", "experts"])
def test_half_goes_and_the_figures_are_those_of_what_the_plain_class_loads(
    method: str, by: str, model: Path, mixture: Path, rows: Rows, tmp_path: Path
) -> None:
    """Field case B60, https://github.com/horseee/LLM-Pruner/issues/37: no class fitted the shapes."""
    source = mixture if method == "experts" else model
    card = run(source, tmp_path / "out", rows, method=method, by=by, sparsity=0.5)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = loaded.config
    key, value = {
        "channels": ("intermediate_size", 48),
        "groups": ("num_key_value_heads", 1),
        "layers": ("num_hidden_layers", 1),
        "experts": ("num_local_experts", 2),
    }[method]
    assert getattr(config, key) == value
    assert perplexity(tmp_path / "out", rows) == pytest.approx(card["figures"]["perplexity"]["after"], rel=1e-5)  # type: ignore[index]
    elements = sum(tensor.numel() for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert elements == sum(parameter.numel() for parameter in loaded.parameters())
    size = card["figures"]["weight_bytes"]  # type: ignore[index]
    assert size["after"] < size["before"] - 30_000


@pytest.mark.parametrize(("method", "keep"), [("channels", 80), ("groups", 1)])
def test_what_went_by_magnitude_was_worth_its_zeros(
    method: str, keep: int, model: Path, rows: Rows, tmp_path: Path
) -> None:
    """Field case B60, https://github.com/CASIA-LMC-Lab/FLAP/issues/7: 1 of 2 groups, 16 of 96 columns."""
    run(model, tmp_path / "out", rows, method=method, keep=keep, by="magnitude")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cut = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for before, after in zip(whole.model.layers, cut.model.layers, strict=True):
        last, left = (
            (before.mlp.down_proj, after.mlp.down_proj)
            if method == "channels"
            else (before.self_attn.o_proj, after.self_attn.o_proj)
        )
        kept = {tuple(column.tolist()) for column in left.weight.T}
        for column in last.weight.data.T:
            if tuple(column.tolist()) not in kept:
                column.zero_()
        assert int((last.weight == 0).all(0).sum()) == last.weight.shape[1] - left.weight.shape[1]
    assert float((logits(whole) - logits(cut)).abs().max()) < 1e-5


def test_a_block_that_adds_nothing_goes_first(make_model: Callable[..., Path], rows: Rows, tmp_path: Path) -> None:
    source = make_model("deep")
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers = 4
    torch.manual_seed(3)
    deep = AutoModelForCausalLM.from_config(config)
    for leaf in (deep.model.layers[1].self_attn.o_proj, deep.model.layers[1].mlp.down_proj):
        leaf.weight.data.zero_()
    deep.save_pretrained(source)
    figures = run(source, tmp_path / "out", rows, method="layers", keep=3)["figures"]
    assert figures["layers_kept"] == [0, 2, 3]  # type: ignore[index]
    assert float((logits(deep) - logits(tmp_path / "out")).abs().max()) < 1e-5
    assert figures["kl_divergence"] < 1e-6  # type: ignore[index]


def test_an_expert_that_no_token_goes_to_goes_first(model: Path, rows: Rows, tmp_path: Path) -> None:
    """Of u, -u, w, -w and 0 the last is never among the two that are largest for a token."""
    source = family(model, tmp_path / "in", "mixtral", **EXPERTS | {"num_local_experts": 5})
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for layer, unused in zip(whole.model.layers, (2, 0), strict=True):
        gate = layer.mlp.gate.weight.data
        u, w = gate[3].clone(), gate[4].clone()
        gate.copy_(torch.stack([u, -u, torch.zeros_like(u), w, -w]).roll(unused - 2, 0))
    whole.save_pretrained(source)
    run(source, tmp_path / "out", rows, method="experts", keep=4)
    cut = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for before, after, unused in zip(whole.model.layers, cut.model.layers, (2, 0), strict=True):
        kept = [expert for expert in range(5) if expert != unused]
        assert torch.equal(before.mlp.experts.down_proj[kept], after.mlp.experts.down_proj)
    assert float((logits(whole) - logits(cut)).abs().max()) < 1e-5


def test_a_family_whose_config_can_not_say_it_is_refused_before_anything_is_read(
    model: Path, rows: Rows, tmp_path: Path
) -> None:
    """Olmo 2 norms all heads together, by one vector whose length is theirs."""
    source = family(model, tmp_path / "in", "olmo2")
    with pytest.raises(UserError, match=r"Olmo2ForCausalLM has no config for that: .*self_attn\.k_norm\.weight"):
        run(source, tmp_path / "out", rows, method="groups", keep=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "layers"}, "or --keep"),
        ({"method": "layers", "keep": 1, "sparsity": 0.5}, "either --sparsity"),
        ({"method": "layers", "keep": 2}, "--keep 2 would leave 2 of 2 layers"),
        ({"method": "groups", "sparsity": 0.2}, "--sparsity 0.2 would leave 2 of 2 groups"),
        ({"method": "experts", "keep": 2}, "the model has no experts"),
        ({"method": "layers", "keep": 1, "by": "luck"}, "--by luck"),
        ({"method": "wanda", "keep": 1}, "--keep is for channels, groups, layers, experts"),
        ({"method": "wanda", "sparsity": 0.5, "scope": "global"}, "takes --method magnitude"),
    ],
)
def test_what_can_not_be_done_is_said_at_once(
    values: dict[str, Any], message: str, model: Path, rows: Rows, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        prune(model, tmp_path / "out", PruneConfig(**values), rows, LENGTH, lambda _: None)
    assert not list(tmp_path.iterdir())


def test_a_token_goes_to_no_more_experts_than_are_left(mixture: Path, rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 experts would be left, and each token goes to 2"):
        run(mixture, tmp_path / "out", rows, method="experts", keep=1)


def test_weights_of_all_layers_are_compared(model: Path, rows: Rows, tmp_path: Path) -> None:
    """Beside a sort of all of them."""
    card = run(model, tmp_path / "out", rows, method="magnitude", sparsity=0.37, scope="global")
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    names = [name for name in before if "_proj" in name]
    largest_gone = torch.cat([before[name][after[name] == 0].abs() for name in names]).max()
    smallest_left = torch.cat([after[name][after[name] != 0].abs() for name in names]).min()
    assert largest_gone <= smallest_left
    total = sum(before[name].numel() for name in names)
    assert card["figures"]["pruned_weights"] == round(total * 0.37)  # type: ignore[index]
    shares = [float((after[name] == 0).float().mean()) for name in names]
    assert max(shares) - min(shares) > 1e-3


def test_names_and_config_of_the_blocks_that_stay() -> None:
    assert renumbered("model.layers.12.mlp.weight", "model.layers", [3, 12]) == "model.layers.1.mlp.weight"
    assert renumbered("model.layers.1.mlp.weight", "model.layers", [3, 12]) is None
    assert renumbered("model.norm.weight", "model.layers", [3]) == "model.norm.weight"
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "mlp_only_layers": [0, 2], "eos_token_id": [1, 2]}
    assert config_of_layers(config, [1, 2], 3) == {
        "num_hidden_layers": 2,
        "layer_types": ["b", "c"],
        "mlp_only_layers": [1],
        "eos_token_id": [1, 2],
    }
    assert largest([0.5, 2.0, 0.5, 0.1], 2) == [0, 1]


def test_heads_are_averaged_with_their_neighbours() -> None:
    weight = torch.arange(8.0)[:, None].repeat(1, 3)  # four heads of two
    assert averaged_heads(weight, 4, 2)[:, 0].tolist() == [1.0, 2.0, 5.0, 6.0]
    with pytest.raises(ValueError, match="4 heads"):
        averaged_heads(weight, 4, 3)


@pytest.mark.parametrize("method", ["channels", "groups", "layers", "experts", "wanda"])
def test_what_was_zeroed_before_stays_zero_and_its_masks_are_cut(
    method: str, model: Path, mixture: Path, rows: Rows, tmp_path: Path
) -> None:
    """Making up for what goes fills weights that were zero: the masks take them away again."""
    source = mixture if method == "experts" else model
    run(source, tmp_path / "sparse", rows, method="magnitude", sparsity=0.5, ignore=("*.q_proj",))
    run(tmp_path / "sparse", tmp_path / "out", rows, method=method, sparsity=0.5)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    first, masks = Masks.read(tmp_path / "sparse"), Masks.read(tmp_path / "out")
    assert set(masks) >= {name for name in first if name in weights}
    assert set(masks) <= weights.keys()
    counts = {name: masks.stays(name, tuple(weights[name].shape)) for name in masks}
    assert all(bool((weights[name][~stays] == 0).all()) for name, stays in counts.items())
    free = [stays for name, stays in counts.items() if method != "wanda" or "q_proj" not in name]
    assert 0.35 < float(torch.cat([stays.flatten() for stays in free]).float().mean()) < 0.65
    if method == "layers":
        survivor = AutoConfig.from_pretrained(tmp_path / "out").num_hidden_layers
        assert {name.split(".")[2] for name in masks} == {str(index) for index in range(survivor)}
