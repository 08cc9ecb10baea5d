"""Adapters on every backend: they learn what one process learns, the base stays as it is, and peft reads the result.

Field case B31: https://github.com/pytorch/pytorch/issues/91167 (frozen and trainable tensors in one unit were refused),
https://github.com/huggingface/peft/issues/1702, https://github.com/mosaicml/llm-foundry/issues/414.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.pool import Pools
from tests.train.jobs import PROBE, Adapted, adapt
from tests.train.support import TINY, shardlab, write_recipe

BACKENDS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
LORA = {"rank": 2, "alpha": 8.0, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Run:
    """A run with adapters, on all its ranks, and where its base and its results lie."""

    base: Path
    directory: Path
    ranks: list[Adapted]


Start = Callable[[str], Run]


@pytest.fixture(scope="module")
def run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`run(backend)`: five steps on two ranks; `run("alone")` on one process. Each once."""
    place = tmp_path_factory.mktemp("lora")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, "vocab_size": 320}))
    model.save_pretrained(place / "base")
    schedule = {"name": "constant", "warmup_steps": 0}
    recipe = write_recipe(
        place,
        model={"path": str(place / "base"), "lora": LORA},
        train={"steps": 5, "schedule": schedule},
        shard={"micro_batch": 2},
    )
    known: dict[str, Run] = {}

    def run(backend: str) -> Run:
        if backend not in known:
            directory = place / backend
            directory.mkdir()
            options = {"recipe": recipe, "directory": directory}
            if backend == "alone":
                ranks = [adapt(overrides=[], **options)]
            else:
                overrides = [f"shard.backend={backend}"]
                ranks = pools.run(2, "tests.train.jobs", "adapt", overrides=overrides, **options)
            known[backend] = Run(place / "base", directory, ranks)
        return known[backend]

    return run


def is_adapter(name: str) -> bool:
    return ".lora_" in name


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_learn_what_one_process_learns(run: Start, backend: str) -> None:
    first, alone = run(backend).ranks[0], run("alone").ranks[0]
    assert first.losses == pytest.approx(alone.losses, rel=1e-6)
    assert first.before.keys() == alone.before.keys()
    adapters = [name for name in alone.after if is_adapter(name)]
    assert len(adapters) == 2 * 2 * 2, "two layers, two targets, two factors"
    for name in adapters:
        np.testing.assert_array_equal(first.before[name], alone.before[name], err_msg=name)
        np.testing.assert_allclose(first.after[name], alone.after[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(alone.after[name] - alone.before[name]).max() > 1e-4, "or there was nothing to compare"


@pytest.mark.parametrize("backend", ["alone", *BACKENDS])
def test_the_base_keeps_every_bit(run: Start, backend: str) -> None:
    done = run(backend)
    stored = load_file(done.base / "model.safetensors")
    outcome = done.ranks[0]
    base = {name: value for name, value in outcome.after.items() if not is_adapter(name)}
    assert len(base) == len(stored)
    for name, value in base.items():
        np.testing.assert_array_equal(value, outcome.before[name], err_msg=name)
        np.testing.assert_array_equal(value, stored[name.replace(".base_layer", "")].numpy(), err_msg=name)


@pytest.mark.parametrize("backend", ["alone", *BACKENDS])
def test_optimizer_state_is_for_adapters_only(run: Start, backend: str) -> None:
    outcomes = run(backend).ranks
    sizes = {name: value.size for name, value in outcomes[0].after.items() if is_adapter(name)}
    adapters, held = sum(sizes.values()), sum(outcome.state_elements for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.trainable == set(sizes)
    if backend in ("alone", "ddp"):
        assert held == len(outcomes) * adapters
    else:
        assert adapters <= held <= adapters + 2 * len(sizes), "each element once, and padding to equal shards"


@pytest.mark.parametrize("backend", ["alone", *BACKENDS])
def test_peft_loads_the_adapters_and_its_merge_is_ours(run: Start, backend: str) -> None:
    """https://github.com/huggingface/peft/issues/1702: what was loaded was not what had been trained."""
    from peft import PeftModel

    done = run(backend)
    assert {file.name for file in (done.directory / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer_config.json",
    }
    outcome = done.ranks[0]
    base = AutoModelForCausalLM.from_pretrained(done.base)
    adapted = PeftModel.from_pretrained(base, done.directory / "adapters").eval()
    loaded = {name.replace("base_model.model.", ""): value for name, value in adapted.named_parameters()}
    for name, value in outcome.after.items():
        np.testing.assert_array_equal(loaded[name].detach().numpy(), value, err_msg=name)
    merged = adapted.merge_and_unload()
    ours = load_file(done.directory / "merged/model.safetensors")
    theirs = dict(merged.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-6, atol=1e-7, msg=name)
    probe = torch.tensor(PROBE)
    reloaded = AutoModelForCausalLM.from_pretrained(done.directory / "merged")
    torch.testing.assert_close(reloaded(probe).logits, merged(probe).logits, rtol=1e-5, atol=1e-6)


def test_a_base_that_transformers_loads_with_its_adapters(run: Start) -> None:
    """As docs/adapters.md says: the directory alone is enough, for it names its base."""
    done = run("alone")
    model = AutoModelForCausalLM.from_pretrained(done.directory / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(done.directory / "merged")
    probe = torch.tensor(PROBE)
    torch.testing.assert_close(model(probe).logits, merged(probe).logits, rtol=1e-4, atol=1e-5)


def test_merging_afterwards_gives_the_same(run: Start, tmp_path: Path) -> None:
    done = run("alone")
    assert shardlab("merge", done.directory / "adapters", tmp_path / "model").code == 0
    ours, after = (
        load_file(done.directory / "merged/model.safetensors"),
        load_file(tmp_path / "model/model.safetensors"),
    )
    assert ours.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7, msg=name)
    assert (tmp_path / "model/tokenizer_config.json").is_file()
    again = shardlab("merge", done.directory / "adapters", tmp_path / "model")
    assert again.error == f"{tmp_path / 'model'} exists; it is never overwritten. Remove it or choose another directory"


def test_adapters_alone_are_not_evaluated(run: Start) -> None:
    adapters = run("alone").directory / "adapters"
    assert shardlab("eval", adapters).error.startswith(f"{adapters} holds adapters only; `shardlab merge")


def test_a_model_directory_is_no_adapter_directory(run: Start, tmp_path: Path) -> None:
    base = run("alone").base
    assert "is not an adapter directory" in shardlab("merge", base, tmp_path / "out").error


def test_a_target_that_is_no_layer_is_one_line_and_leaves_nothing(run: Start, tmp_path: Path) -> None:
    model = {"path": str(run("alone").base), "lora": {"targets": ["no_such_layer"]}}
    ended = shardlab("train", write_recipe(tmp_path, model=model), "--output", tmp_path / "run")
    assert ended.error.startswith("model.lora.targets: ")
    assert "no_such_layer" in ended.error
    assert not (tmp_path / "run").exists()


def test_the_adapters_config_is_pefts(run: Start) -> None:
    done = run("zero3")
    config = json.loads((done.directory / "adapters/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 8.0, 0.1)
    assert config["base_model_name_or_path"] == str(done.base.resolve())
    expected = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in ("q", "v")}
    assert set(config["target_modules"]) == expected
