"""What a model has beside weights: buffers that belong into its file, and how it generates."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.distributed.pool import Pools
from tests.train.builders import Normed
from tests.train.support import TINY, shardlab, write_recipe

ROUTED = {  # expert layers choose by a buffer, which is trained elsewhere and stored
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("backend", ["one process", "ddp", "fsdp", "zero3"])
def test_a_builders_module_is_loaded_by_its_own_class(tmp_path: Path, pools: Pools, backend: str) -> None:
    """Statistics too: without them a batch norm scales by its first values, and no error says so."""
    model = {"builder": "tests.train.builders:normed"}
    output = tmp_path / "run"
    if backend == "one process":
        recipe = write_recipe(tmp_path, model=model)
        assert shardlab("train", recipe, "--output", output).code == 0
    else:
        recipe = write_recipe(tmp_path, model=model, shard={"backend": backend, "micro_batch": 2})
        pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=output)
    saved = load_file(output / "model/model.safetensors")
    fresh = Normed()
    fresh.load_state_dict(saved, strict=True)
    assert int(fresh.norm.num_batches_tracked) == 3
    assert fresh.norm.running_mean is not None
    assert fresh.norm.running_mean.abs().max() > 0


@pytest.mark.parametrize("lora", [None, {"rank": 2, "targets": ["o_proj"], "merge": True}])
def test_a_directorys_buffers_are_read_and_written(tmp_path: Path, lora: dict[str, object] | None) -> None:
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ROUTED))
    values = torch.tensor([0.5, -0.25, 0.125, 0.0])
    dict(base.named_buffers())[BIAS].copy_(values)
    base.save_pretrained(tmp_path / "base")
    recipe = write_recipe(tmp_path, model={"path": str(tmp_path / "base"), "lora": lora}, train={"steps": 1})
    ended = shardlab("train", recipe, "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert torch.equal(dict(again.named_buffers())[BIAS], values)


def test_a_buffer_of_another_shape_is_one_line(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**ROUTED)).save_pretrained(tmp_path / "base")
    from safetensors.torch import save_file

    file = tmp_path / "base/model.safetensors"
    save_file({**load_file(file), BIAS: torch.zeros(3)}, file, metadata={"format": "pt"})
    ended = shardlab(
        "train", write_recipe(tmp_path, model={"path": str(tmp_path / "base")}), "--output", tmp_path / "run"
    )
    assert f"{BIAS} is (3,) in the file, but (4,) by config.json" in ended.error
    assert not (tmp_path / "run").exists()


def test_how_a_directory_generates_is_kept(tmp_path: Path) -> None:
    """A chat model without its stop tokens and sampling is another model to whoever calls generate."""
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, "vocab_size": 320}))
    base.generation_config = GenerationConfig(eos_token_id=[2, 7], do_sample=True, temperature=0.6, top_p=0.9)
    base.save_pretrained(tmp_path / "base")
    recipe = write_recipe(tmp_path, model={"path": str(tmp_path / "base")}, train={"steps": 1})
    ended = shardlab("train", recipe, "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    before, after = (
        json.loads((tmp_path / place / "generation_config.json").read_text()) for place in ("base", "run/model")
    )
    assert after == before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").generation_config
    assert (loaded.eos_token_id, loaded.temperature, loaded.top_p) == ([2, 7], 0.6, 0.9)
