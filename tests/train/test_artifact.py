"""The directory that a run leaves: what transformers loads from it is what was trained."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardlab import Engine
from shardlab.errors import UserError
from shardlab.train import artifact
from tests.distributed.pool import Pools
from tests.train.jobs import PROBE, Live, engine_of, train_and_save
from tests.train.support import TINY, write_recipe

TENSORS = 20  # of a Llama with two layers and a tied head


@dataclass(frozen=True)
class Case:
    """A run on one process (no pool) or on two ranks."""

    backend: str
    world: int = 2
    tied: bool = True
    precision: str = "fp32"


CASES = {
    "one process": Case("ddp", world=1),
    "one process, untied": Case("ddp", world=1, tied=False),
    "ddp": Case("ddp"),
    "fsdp": Case("fsdp"),
    "fsdp, untied": Case("fsdp", tied=False),
    "fsdp, bf16": Case("fsdp", precision="bf16"),
    "zero1": Case("zero1"),
    "zero3": Case("zero3"),
    "zero3, untied": Case("zero3", tied=False),
    "zero3, bf16": Case("zero3", precision="bf16"),
}


@dataclass(frozen=True)
class Saved:
    """A case's directory, and the live models of all its ranks."""

    case: Case
    directory: Path
    ranks: list[Live]


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("artifact")
    config = {**TINY, "tie_word_embeddings": case.tied}
    (directory / "config.json").write_text(json.dumps(config))
    recipe = write_recipe(directory, model={"config": str(directory / "config.json")}, train={"steps": 2})
    overrides = [f"shard.backend={case.backend}", f"train.precision={case.precision}"]
    model = directory / "model"
    if case.world == 1:
        return Saved(case, model, [train_and_save(recipe, overrides, model)])
    ranks = pools.run(
        case.world, "tests.train.jobs", "train_and_save", recipe=recipe, overrides=overrides, directory=model
    )
    return Saved(case, model, ranks)


@torch.no_grad()
def test_what_transformers_loads_gives_the_live_model_s_logits(saved: Saved) -> None:
    """https://github.com/huggingface/transformers/issues/28630: a tied head came apart on its way through the file."""
    model, report = AutoModelForCausalLM.from_pretrained(saved.directory, output_loading_info=True)
    assert not any(report.values()), report
    inputs = torch.tensor(PROBE)
    expected = model(input_ids=inputs, use_cache=False).logits.float().numpy()
    for live in saved.ranks:
        assert np.abs(live.logits - expected).max() <= (1e-6 if saved.case.precision == "fp32" else 2e-2)


def test_every_tensor_is_there_once_and_whole(saved: Saved) -> None:
    """https://github.com/huggingface/transformers/issues/20082: under ZeRO-3 each file's tensors had no elements."""
    tensors = load_file(saved.directory / "model.safetensors")
    assert len(tensors) == TENSORS + (not saved.case.tied)
    assert ("lm_head.weight" in tensors) == (not saved.case.tied)
    model = AutoModelForCausalLM.from_pretrained(saved.directory)
    for name, tensor in tensors.items():
        assert tensor.shape == model.get_parameter(name).shape
        assert tensor.numel() > 0
        assert tensor.isfinite().all()


def test_its_precision_is_the_one_it_computed_in(saved: Saved) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[saved.case.precision]
    tensors = load_file(saved.directory / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(saved.directory).dtype == dtype


def test_buffers_are_right_on_every_rank(saved: Saved) -> None:
    """https://github.com/NovaSky-AI/SkyRL/issues/1709: only the first rank's rotary frequencies were right."""
    plain = AutoModelForCausalLM.from_pretrained(saved.directory)
    expected = {name.removeprefix("model."): buffer.numpy() for name, buffer in plain.named_buffers()}
    assert expected
    for live in saved.ranks:
        assert live.buffers.keys() == expected.keys()
        for name, buffer in expected.items():
            np.testing.assert_array_equal(live.buffers[name], buffer)


def test_its_config_is_the_model_s_own(saved: Saved) -> None:
    """https://github.com/huggingface/transformers/issues/28056: the cache, off in training, stayed off in the file."""
    config = json.loads((saved.directory / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is saved.case.tied
    assert config["vocab_size"] == 257, "of the tokenizer, which has more entries than the config had"


def test_its_tokenizer_loads(saved: Saved) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved.directory)
    assert tokenizer.decode(tokenizer.encode("naïve text\n")) == "naïve text\n"
    config = json.loads((saved.directory / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_nothing_half_written_is_left_beside_it(saved: Saved) -> None:
    assert not list(saved.directory.parent.glob("*partial*"))
    assert not list(saved.directory.parent.glob(".model*"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Holds the tiny preset's model."""
    engine, _ = engine_of(write_recipe(tmp_path))
    yield engine
    engine.close()


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    return dict(engine._backend.tensors())


def replace_tensors(monkeypatch: pytest.MonkeyPatch, engine: Engine, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """What a backend with a fault would hand out."""
    monkeypatch.setattr(engine._backend, "tensors", lambda: tensors)


FAULTY = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("fault", ["no elements", "missing", "twice", "unknown"])
def test_a_tensor_that_is_not_the_model_s_is_named_and_nothing_is_left(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """https://github.com/OpenRLHF/OpenRLHF/issues/839: the fault showed when the model was loaded, days later."""
    tensors = list(tensors_of(engine).items())
    names = [name for name, _ in tensors]
    index = names.index(FAULTY)
    named = FAULTY
    if fault == "no elements":
        tensors[index] = (FAULTY, torch.empty(0))
    elif fault == "missing":
        del tensors[index]
    elif fault == "twice":
        tensors.append(tensors[index])
    else:
        named = "stranger.weight"
        tensors.append((named, torch.ones(2)))
    replace_tensors(monkeypatch, engine, iter(tensors))
    with pytest.raises(RuntimeError, match=named):
        engine.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_save_that_is_killed_leaves_nothing_under_its_name_and_can_be_repeated(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = list(tensors_of(engine).items())

    def dying() -> Iterator[tuple[str, Tensor]]:
        yield from tensors[:10]
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(artifact, "SHARD_BYTES", 100_000)  # so that part of it is written by then
    with monkeypatch.context() as patched:
        replace_tensors(patched, engine, dying())
        child = os.fork()
        if child == 0:
            try:
                engine.save(tmp_path / "model")
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert list(tmp_path.glob("**/*.safetensors")), "it was killed in between"
    assert not (tmp_path / "model").exists()
    engine.save(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == 112_960
    assert not list(tmp_path.glob(".model*"))


def test_a_large_model_is_several_files_and_an_index(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 50_000
    monkeypatch.setattr(artifact, "SHARD_BYTES", limit)
    engine.save(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert sorted(path.name for path in (tmp_path / "model").glob("*.safetensors")) == files
    live = tensors_of(engine)
    assert index["weight_map"].keys() == live.keys()
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in live.values())
    for file in files:
        held = load_file(tmp_path / "model" / file)
        assert len(held) == 1 or sum(4 * tensor.numel() for tensor in held.values()) <= limit
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in live.items():
        assert torch.equal(loaded.get_parameter(name), tensor)


def test_a_directory_that_is_there_is_left_alone(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="never overwritten"):
        engine.save(tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_a_rank_that_comes_late_to_the_save_finds_no_fault(pools: Pools, tmp_path: Path) -> None:
    """The first rank's own directory, written meanwhile, is not another run's."""
    recipe, model = write_recipe(tmp_path), tmp_path / "model"
    pools.run(2, "tests.train.jobs", "save_late", recipe=recipe, directory=model)
    assert (model / "model.safetensors").is_file()
