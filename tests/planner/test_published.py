"""Peaks of memory that others measured on devices that are not here; docs/planning.md says what each plan assumes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.plan import Plan
from shardlab.planner.machine import GIB, parse_hardware
from shardlab.planner.search import predictor
from shardlab.recipe import Recipe

pytestmark = pytest.mark.slow

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip
LORA = 16.2  # GiB; torchtune's README: Llama 3.1 8B, adapters of rank 8, one device, 2 rows of 2048 tokens
TITAN = {8: 82.4, 128: 67.0}  # GiB by H100s; torchtitan's report of December 2024, tables 1 and 3: rows of 8192


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory that has a config and no weights, which a plan does not read."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def recipe(model: dict[str, Any], ranks: int, sequence_length: int) -> Recipe:
    return Recipe.from_dict(
        {
            "model": model,
            "data": {"tokenizer": "bytes", "sequence_length": sequence_length, "packing": False},
            "train": {"global_batch_size": 2 * ranks},
        }
    )


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all-linear", "two"])
def test_adapters_on_eight_billion_frozen_weights_take_the_published_memory(llama: Path, targets: Any) -> None:
    """Frozen weights are bf16, without masters, gradients and moments: one of those more, and it would not hold."""
    model = {"path": str(llama), "lora": {"rank": 8, "targets": targets}}
    predict = predictor(recipe(model, 1, 2048), parse_hardware("H100-80G"))
    found = predict.footprint(Plan("ddp", 1, 2, 1, 2, "bf16", recompute="full"))
    assert found.middle / GIB == pytest.approx(LORA, rel=0.1)
    assert found.bytes["parameters"] > 10 * found.bytes["moments"]


def test_selective_recompute_takes_the_published_memory(llama: Path) -> None:
    """FSDP with whole logits, and the policy that we have from there; full is half of it, none twice as much."""
    asked = recipe({"config": str(llama / "config.json")}, 8, 8192)
    predict = predictor(asked, parse_hardware("8xH100-96G"), loop="hf")
    for ranks, published in TITAN.items():
        plan = Plan("fsdp", ranks, 2, 1, 2 * ranks, "bf16", recompute="selective")
        full, none = (predict.footprint(replace(plan, recompute=how)) for how in ("full", "none"))
        assert predict.footprint(plan).middle / GIB == pytest.approx(published, rel=0.1)
        assert full.high / GIB < published < none.low / GIB
