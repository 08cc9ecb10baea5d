"""Models whose documents see each other when packed: refused, in one line, before any training."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

from shardlab import Engine
from shardlab.errors import UserError
from tests.train.loop import batch
from tests.train.support import shardlab, write_recipe, write_text

OPT = {
    "model_type": "opt",
    "vocab_size": 320,
    "hidden_size": 32,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
REFUSAL = "OPTForCausalLM does not keep documents in one row apart"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    return write_recipe(tmp_path, model={"config": str(tmp_path / "config.json")})


def test_packing_is_refused_and_leaves_the_directory_free(recipe: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/1230"""
    output = tmp_path / "run"
    assert shardlab("train", recipe, "--output", output).error.startswith(REFUSAL)
    mended = shardlab("train", recipe, "--output", output, "--set=data.packing=false")
    assert mended.code == 0, mended.err


def test_eval_refuses_it_too(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    assert shardlab("train", recipe, "--output", tmp_path / "run", "--set=data.packing=false").code == 0
    held_out = str(write_text(tmp_path / "held-out.txt", words=20))
    arguments = ("eval", tmp_path / "run/model", "--files", held_out, "--sequence-length", "32")
    assert shardlab(*arguments).error.startswith(REFUSAL)
    assert shardlab(*arguments, "--no-packing").code == 0


def test_a_users_own_rows_are_looked_at(recipe: Path) -> None:
    """Padding in front is a document of its own to the positions, and so to the mask of every other family."""
    model = AutoModelForCausalLM.from_config(OPTConfig(**{**OPT, "vocab_size": 64}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = batch(0)
    mask = torch.ones_like(plain["input_ids"])
    right, left = mask.clone(), mask.clone()
    right[:, -3:], left[:, :3] = 0, 0
    engine = Engine.from_recipe(recipe, overrides=["shard.micro_batch=2", "train.global_batch_size=2"])
    batches = [plain, {**plain, "attention_mask": right}, {**plain, "attention_mask": left}]
    _, _, loader = engine.prepare(model, optimizer, batches)
    assert engine.step(next(loader)) is not None
    assert engine.step(next(loader)) is not None
    with pytest.raises(UserError, match=REFUSAL):
        engine.step(next(loader))
