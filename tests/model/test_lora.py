"""Adapters put into a model in place, and merged as peft merges them."""

import sys
from pathlib import Path

import pytest
import torch

from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.model.lora import inject, merged_tensors, transposed_layers
from shardlab.model.trainable import make_trainable
from shardlab.recipe import LoraSection, ModelSection
from tests.model.families import CONFIGS, TIED, VOCABULARY, batch, build

FAMILIES = ["llama", "gpt2", "opt", "gpt-neox", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_is_frozen_but_for_adapters_of_every_layer_but_the_head(family: str) -> None:
    model = inject(build(CONFIGS[family]()), LoraSection(rank=2))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    linear = {
        name
        for name, module in build(CONFIGS[family]()).named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and "head" not in name and "embed_out" not in name
    }
    assert {name.split(".lora_")[0] for name in trained} == linear


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_merged_tensors_are_pefts_own(family: str) -> None:
    """GPT-2 keeps its weights transposed: merged the wrong way round a square one would still have its shape."""
    from peft import LoraConfig, get_peft_model

    section = LoraSection(rank=2, alpha=8.0)
    model = inject(build(CONFIGS[family]()), section)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    trainable = make_trainable(model)
    ours = dict(merged_tensors(trainable.named_canonical(), section, transposed_layers(trainable)))
    draw = torch.Generator().manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=8.0, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(build(CONFIGS[family]()), config)
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    expected = dict(theirs.merge_and_unload().named_parameters())
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "tied llama", "gpt2"])
def test_fresh_adapters_change_nothing(family: str, tmp_path: Path) -> None:
    plain = build(CONFIGS[family]()).eval()
    plain.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), lora=LoraSection(rank=2))
    model, weights = build_model(section, vocabulary=VOCABULARY, eos_token_id=2, sequence_length=12, seed=0)
    trainable = make_trainable(model)
    values = {name: weights.tensor(name) for name, _ in trainable.named_canonical()}
    adapters = {name: value for name, value in values.items() if ".lora_" in name}
    assert all((value == 0).all() == (".lora_B." in name) for name, value in adapters.items())
    base = {name.replace(".base_layer", ""): value for name, value in values.items() if name not in adapters}
    for name, value in plain.named_parameters():
        assert torch.equal(base[name], value), name
    assert trainable.tied == (family in TIED)


def test_adapters_get_gradients_and_the_base_none() -> None:
    model = inject(build(CONFIGS["llama"]()), LoraSection(rank=2))
    trainable = make_trainable(model, recompute="full")
    trainable(batch(), 23.0).backward()
    for name, parameter in trainable.named_canonical():
        assert (parameter.grad is not None) == (".lora_" in name), name
        if ".lora_B." in name:
            assert parameter.grad is not None
            assert parameter.grad.norm() > 0, name


def test_without_peft_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model\.lora needs peft: `pip install 'shardlab\[lora\]'`"):
        inject(build(CONFIGS["llama"]()), LoraSection())


def test_a_target_that_matches_nothing_is_named() -> None:
    with pytest.raises(UserError, match=r"model\.lora\.targets: .*no_such_layer"):
        inject(build(CONFIGS["llama"]()), LoraSection(targets=("no_such_layer",)))
