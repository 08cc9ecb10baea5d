"""The model that a recipe asks for, and weights read from a Hugging Face directory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardlab.backends.materialize import Materializer
from shardlab.errors import UserError
from shardlab.model.build import build_model
from shardlab.model.deferred import Weights
from shardlab.model.trainable import CausalLM, make_trainable
from shardlab.recipe import ModelSection
from tests.model.families import CONFIGS, VOCABULARY, batch, build, inputs


def built(section: ModelSection, vocabulary: int = VOCABULARY, sequence_length: int = 12) -> tuple[nn.Module, Weights]:
    return build_model(section, vocabulary=vocabulary, eos_token_id=2, sequence_length=sequence_length, seed=0)


def saved(family: str, directory: Path, **options: str) -> nn.Module:
    """A model as transformers builds and saves it."""
    model = build(CONFIGS[family]()).eval()
    model.save_pretrained(directory, **options)
    return model


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_a_directory_s_model_gives_the_logits_that_transformers_gives(family: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/48892: loaded through meta, buffers were garbage."""
    plain = saved(family, tmp_path)
    expected = plain(**inputs(batch()), use_cache=False).logits
    model, weights = built(ModelSection(path=str(tmp_path)))
    assert all(parameter.is_meta for parameter in model.parameters())
    trainable = make_trainable(model).eval()
    assert isinstance(trainable, CausalLM)
    Materializer(trainable, weights, torch.device("cpu")).materialize(trainable)
    assert torch.equal(trainable.logits(batch()), expected)


def test_a_directory_in_several_files_is_read(tmp_path: Path) -> None:
    plain = saved("llama", tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    _, weights = built(ModelSection(path=str(tmp_path)))
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights.tensor(name), parameter)


@pytest.mark.parametrize("family", ["llama", "tied llama"])
def test_an_enlarged_vocabulary_keeps_the_rows_that_there_are(family: str, tmp_path: Path) -> None:
    plain = saved(family, tmp_path)
    model, weights = built(ModelSection(path=str(tmp_path)), vocabulary=70)
    assert model.config.vocab_size == 70
    for name, parameter in model.named_parameters():
        value = weights.tensor(name)
        assert value.shape == parameter.shape
        expected = plain.get_parameter(name)
        assert torch.equal(value[: len(expected)], expected)
    rows = weights.tensor("model.embed_tokens.weight")[VOCABULARY:]
    assert rows.shape[0] == 6
    assert rows.std() > 0


def test_tied_tensors_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/30202: the config says tied, the file holds two tensors."""
    saved("tied llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    built(ModelSection(path=str(tmp_path)))
    head[3, 4] += 0.5
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight.*differ by up to 0\.5"):
        built(ModelSection(path=str(tmp_path)))


def test_a_directory_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        built(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize("content", [None, b"", b"no tensors"])
def test_a_directory_without_readable_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="safetensors"):
        built(ModelSection(path=str(tmp_path)))


def test_a_preset_takes_the_tokenizer_s_vocabulary_rounded_up() -> None:
    model, _ = built(ModelSection(preset="tiny"), vocabulary=257)
    assert model.config.vocab_size == 320
    assert model.config.eos_token_id == 2
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_config_file_gives_the_architecture(tmp_path: Path) -> None:
    CONFIGS["gpt2"]().save_pretrained(tmp_path)
    model, weights = built(ModelSection(config=str(tmp_path / "config.json")))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert weights.tensor("transformer.wte.weight").shape == (64, 32)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "can't be read"), ("[]", "model_type"), ("{}", "model_type"), ('{"model_type": "lama"}', "lama")],
)
def test_a_config_file_that_is_none_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError, match=complaint):
        built(ModelSection(config=str(file)))


def test_sequences_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt2"]().to_dict()))
    section = ModelSection(config=str(tmp_path / "config.json"))
    built(section, sequence_length=64)
    with pytest.raises(UserError, match=r"65.*64"):
        built(section, sequence_length=65)


def test_a_builder_s_model_is_taken_as_it_is() -> None:
    model, _ = built(ModelSection(builder="tests.distributed.models:SummedLinear"))
    assert type(model).__name__ == "SummedLinear"


@pytest.mark.parametrize("builder", ["no.such:thing", "tests.distributed.models:nothing", "tests.model.families:TIED"])
def test_a_builder_that_is_none_is_refused(builder: str) -> None:
    with pytest.raises(UserError, match=builder):
        built(ModelSection(builder=builder))


def test_freezing_is_by_pattern_and_a_pattern_must_match() -> None:
    model, _ = built(ModelSection(preset="tiny", freeze=("*.mlp.*",)))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".mlp." in name}
    with pytest.raises(UserError, match=r"\*\.mpl\.\*"):
        built(ModelSection(preset="tiny", freeze=("*.mpl.*",)))
