"""What a recipe names as its model, as users get it wrong: one line each, and nothing made up in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.recipe import ModelSection
from tests.train.support import TINY

Values = dict[str, Tensor]


def built(vocabulary: int = 64, **section: Any) -> tuple[torch.nn.Module, Values]:
    """The model, and its values where there are few."""
    model, weights = build_model(
        ModelSection(**section), vocabulary=vocabulary, eos_token_id=0, sequence_length=32, seed=0
    )
    small = sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    return model, {name: weights.tensor(name) for name, _ in model.named_parameters()} if small else {}


def refused(**section: Any) -> str:
    """What a user is told."""
    with pytest.raises(UserError) as error:
        built(**section)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def source(directory: Path, **config: Any) -> PreTrainedModel:
    """A directory that transformers has written."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **config}))
    model.save_pretrained(directory)
    return model.eval()


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("preset", "vocabulary", "parameters"),
    [("tiny", 257, 112_960), ("6m", 8192, 6_052_608), ("150m", 32_000, 152_006_400)],
)
def test_presets_are_as_large_as_their_names_say(preset: str, vocabulary: int, parameters: int) -> None:
    """On the meta device: no value is made for the count."""
    model, _ = built(vocabulary, preset=preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (TINY, "LlamaForCausalLM"),
        ({**TINY, "model_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "GPT2LMHeadModel"),
    ],
)
def test_a_config_file_is_enough_and_takes_the_tokenizer_s_size(
    tmp_path: Path, config: dict[str, Any], architecture: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, values = built(100, config=str(tmp_path / "config.json"))
    assert type(model).__name__ == architecture
    assert model.config.vocab_size == 100
    assert model.config.eos_token_id == 0
    assert all(value.isfinite().all() for value in values.values())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        ({"model_type": "lama"}, "no model_type 'lama'"),
        ({"model_type": 3}, "no model_type 3"),
        ({"model_type": "vit"}, "model_type vit has no causal language model in transformers"),
        ({"model_type": "t5"}, "train it with model.builder"),
        ({**TINY, "num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({**TINY, "hidden_size": "32"}, "'hidden_size' expected int"),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(tmp_path: Path, content: Any, complaint: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(json.dumps(content))
    said = refused(config=str(file))
    assert said.startswith(f"model.config: {file}")
    assert complaint in said


@pytest.mark.parametrize("changes", [{"model_type": "lama"}, {"model_type": "vit"}, {"num_attention_heads": 5}])
def test_so_is_such_a_config_in_a_directory(tmp_path: Path, changes: dict[str, Any]) -> None:
    source(tmp_path)
    edit_config(tmp_path, **changes)
    assert refused(path=str(tmp_path)).startswith(f"model.path: {tmp_path / 'config.json'}")


def test_a_directory_that_is_none_is_one_line(tmp_path: Path) -> None:
    assert "it has no config.json" in refused(path=str(tmp_path))
    source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "can't be read as a Hugging Face config" in refused(path=str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert "holds no safetensors file" in refused(path=str(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_s_values_arrive_bit_by_bit(tmp_path: Path, tied: bool) -> None:
    """https://github.com/huggingface/transformers/issues/48892: buffers were garbage after a meta start."""
    plain = source(tmp_path, tie_word_embeddings=tied)
    model, values = built(path=str(tmp_path))
    assert len(values) == (20 if tied else 21)
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name
    buffers = dict(model.named_buffers())
    assert set(buffers) == {name for name, _ in plain.named_buffers()}
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_a_base_model_s_file_names_its_tensors_shorter(tmp_path: Path) -> None:
    """As the GPT-2 that most people download: `wte.weight`, and no head."""
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=64)
    plain = AutoModelForCausalLM.from_config(config)
    plain.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    edit_config(tmp_path, architectures=["GPT2LMHeadModel"], bos_token_id=None, eos_token_id=None)
    _, values = built(path=str(tmp_path))
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("file", "damage", "complaint"),
    [
        ("model.safetensors", _truncate, "model.safetensors is damaged"),
        ("model-00002-of-00005.safetensors", _truncate, "model-00002-of-00005.safetensors is damaged"),
        ("model-00002-of-00005.safetensors", Path.unlink, "model-00002-of-00005.safetensors is missing"),
        ("model.safetensors.index.json", _truncate, "model.safetensors.index.json is damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, damage: Callable[[Path], None], complaint: str) -> None:
    model = source(tmp_path / "plain")
    options = {} if file == "model.safetensors" else {"max_shard_size": "20KB"}
    model.save_pretrained(tmp_path / "hurt", **options)
    built(path=str(tmp_path / "hurt"))
    damage(tmp_path / "hurt" / file)
    assert complaint in refused(path=str(tmp_path / "hurt"))


@pytest.mark.parametrize(
    ("changes", "tensor", "shapes"),
    [
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight", ("(16, 32)", "(32, 32)")),
        ({"intermediate_size": 64}, "mlp.down_proj.weight", ("(32, 48)", "(32, 64)")),
        ({"vocab_size": 60}, "lm_head.weight", ("(64, 32)", "(60, 32)")),
    ],
)
def test_no_part_of_a_tensor_is_made_up(
    tmp_path: Path, changes: dict[str, Any], tensor: str, shapes: tuple[str, str]
) -> None:
    """A file with fewer rows than the config asks for is another model's, unless the rows are the vocabulary's."""
    source(tmp_path)
    edit_config(tmp_path, **changes)
    said = refused(path=str(tmp_path), vocabulary=10)
    assert tensor in said
    assert f"is {shapes[0]} in the file, but {shapes[1]} by config.json" in said


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_new_rows_of_a_vocabulary_follow_from_the_seed(tmp_path: Path, family: str) -> None:
    """So that all ranks make the same ones. Mixtral's files name the experts apart, and transformers loads them."""
    plain = source(tmp_path, model_type=family, **({"num_local_experts": 2} if family == "mixtral" else {}))
    _, first = built(70, path=str(tmp_path))
    torch.manual_seed(17)
    _, second = built(70, path=str(tmp_path))
    for name, parameter in plain.named_parameters():
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name][: len(parameter)], parameter), name
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert first[name].shape == (70, 32)
        assert first[name][64:].std() > 0


def test_tied_tensors_that_differ_are_refused_with_the_difference(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/30202: config tied, two tensors in the file, one lost."""
    source(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.25
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = refused(path=str(tmp_path))
    assert "differ by up to 0.25" in said
    assert "set tie_word_embeddings to false" in said


@pytest.mark.parametrize(
    ("builder", "complaint"),
    [
        ("no_such_package:build", "No module named 'no_such_package'"),
        ("tests.train.builders:nothing", "has no attribute 'nothing'"),
        ("tests.train.builders:BYTES", "is not a function"),
        ("tests.train.builders:returns_a_number", "returns int, not a torch module"),
    ],
)
def test_a_builder_that_builds_nothing_is_one_line(builder: str, complaint: str) -> None:
    said = refused(builder=builder)
    assert said.startswith(f"model.builder: {builder}")
    assert complaint in said
