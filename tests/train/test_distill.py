"""A recipe with a teacher: the same run, the same checkpoints, and what is refused before anything is trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shardlab.checkpoint import CheckpointReader
from shardlab.checkpoint.export import export
from shardlab.data.tokenizer import make_tokenizer
from shardlab.model.matching import PREFIX
from tests.distributed.pool import Pools
from tests.train.support import TINY, losses, shardlab, steps, write_recipe

ROWS = 320  # of the teacher's head, for a tokenizer of 257


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teachers") / "teacher")


def make_teacher(directory: Path, rows: int = ROWS) -> Path:
    """Random weights, large enough that they say something."""
    config = LlamaConfig(**{**TINY, "vocab_size": rows, "num_hidden_layers": 3, "initializer_range": 0.2})
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(directory)
    make_tokenizer("bytes", None, Path()).save_pretrained(directory)  # type: ignore[arg-type]
    return directory


def recipe_of(directory: Path, teacher: Path, rows: int = ROWS, **distill: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "student.json").write_text(json.dumps({**TINY, "vocab_size": rows}))
    recipe = write_recipe(
        directory, model={"config": str(directory / "student.json")}, data={"tokenizer": str(teacher)}
    )
    with recipe.open("a") as file:
        file.write(f"distill: {json.dumps({'teacher': str(teacher), **distill})}\n")
    return recipe


def test_a_student_is_trained_and_saved_without_its_teacher(teacher: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, teacher, temperature=2.0, weight=1.0)
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set", "train.steps=20")
    assert ended.code == 0, ended.err
    assert "1 x forward_kl at temperature 2 + 0 x cross-entropy" in ended.out
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert loaded.config.num_hidden_layers == TINY["num_hidden_layers"]
    assert set(load_file(tmp_path / "run" / "model" / "model.safetensors")) == set(loaded.state_dict())


def test_with_a_weight_of_zero_it_is_the_run_without_a_teacher(teacher: Path, tmp_path: Path) -> None:
    """But for the columns: evaluations too are of the text alone, whatever the weight."""
    recipe = recipe_of(tmp_path, teacher, weight=0.0)
    assert shardlab("train", recipe, "--output", tmp_path / "taught").code == 0
    assert shardlab("train", recipe, "--output", tmp_path / "alone", "--set", "distill=null").code == 0
    assert losses(tmp_path / "taught") == losses(tmp_path / "alone")
    taught, alone = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("taught", "alone"))
    assert taught["evaluation_loss"] == alone["evaluation_loss"]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(teacher: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, teacher, loss="jsd", weight=0.5)
    arguments = ("--set", "train.steps=4", "--output")
    assert shardlab("train", recipe, *arguments, tmp_path / "whole").code == 0
    assert shardlab("train", recipe, *arguments, tmp_path / "cut", "--set", "train.stop_after=2").code == 0
    assert shardlab("train", recipe, *arguments, tmp_path / "cut", "--resume", "auto").code == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_hidden_states_are_learned_from_and_the_projections_stay_in_the_run(teacher: Path, tmp_path: Path) -> None:
    """They are in its checkpoints, and go on learning; neither the model nor a checkpoint's export has them."""
    recipe = recipe_of(tmp_path, teacher, weight=0.5, hidden={"projection": True, "loss": "cosine"})
    arguments = ("--set", "train.steps=4", "--output")
    ended = shardlab("train", recipe, *arguments, tmp_path / "whole")
    assert ended.code == 0, ended.err
    assert "+ 1 x cosine of hidden states through projections, blocks 1<-2, 2<-3" in ended.out
    assert shardlab("train", recipe, *arguments, tmp_path / "cut", "--set", "train.stop_after=2").code == 0
    (saved,) = (tmp_path / "cut" / "checkpoints").glob("step-*")
    with CheckpointReader(saved) as reader:
        learned = [name for name in reader.shapes() if name.startswith(PREFIX)]
    assert len(learned) == TINY["num_hidden_layers"]
    assert shardlab("train", recipe, *arguments, tmp_path / "cut", "--resume", "auto").code == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    export(saved, tmp_path / "exported")
    for directory in (tmp_path / "whole" / "model", tmp_path / "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert set(load_file(directory / "model.safetensors")) == set(loaded.state_dict())


def test_two_ranks_that_shard_the_teacher_train_the_run_of_one(pools: Pools, teacher: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, teacher, weight=0.5)
    assert shardlab("train", recipe, "--output", tmp_path / "alone").code == 0
    recipe.write_text(recipe.read_text().replace("shard: {}", "shard: {backend: fsdp}"))
    summary, _ = pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=tmp_path / "together")
    assert (summary["backend"], summary["world_size"]) == ("fsdp", 2)
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert [row["tokens"] for row in steps(tmp_path / "together")] == [
        row["tokens"] for row in steps(tmp_path / "alone")
    ]
    predicted, base = summary["predicted_memory_bytes"], summary["base_memory_bytes"]
    assert all(peak - own < predicted["high"] for peak, own in zip(summary["peak_memory_bytes"], base, strict=True))


def test_field_case_b56_padded_vocabularies_are_aligned_on_the_tokenizer_s(teacher: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/2215: an error deep in the loss, or padding that is learned."""
    recipe = recipe_of(tmp_path, teacher, rows=264, weight=1.0)
    ended = shardlab("train", recipe, "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert "the teacher's head has 320 rows, the student's 264: compared on the tokenizer's 257" in ended.out
    trimmed = tmp_path / "trimmed"
    LlamaForCausalLM.from_pretrained(teacher).resize_token_embeddings(257)
    model = LlamaForCausalLM.from_pretrained(teacher)
    model.resize_token_embeddings(257)
    model.save_pretrained(trimmed)
    make_tokenizer("bytes", None, Path()).save_pretrained(trimmed)  # type: ignore[arg-type]
    other = recipe_of(tmp_path / "other", trimmed, rows=264, weight=1.0)
    assert shardlab("train", other, "--output", tmp_path / "by hand").code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "by hand"), rel=1e-6)


def refused(recipe: Path, output: Path, *arguments: str) -> str:
    ended = shardlab("train", recipe, "--output", output, *arguments)
    assert ended.code == 2, ended.err
    assert not output.exists() or not any(output.iterdir())
    return ended.err


def test_field_case_b56_a_teacher_without_scores_for_all_tokens_is_refused(tmp_path: Path) -> None:
    small = make_teacher(tmp_path / "small", rows=200)
    message = refused(recipe_of(tmp_path, small), tmp_path / "run")
    assert "has scores for 200 tokens, the tokenizer has 257" in message


def test_field_case_b57_other_tokenizers_are_refused(teacher: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/4562: same size, two ids swapped, and training looks normal."""
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (first, one), (second, two) = list(vocabulary.items())[40:42]
    vocabulary[first], vocabulary[second] = two, one
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused(recipe_of(tmp_path, other), tmp_path / "run", "--set", f"data.tokenizer={teacher}")
    assert f"the tokenizers differ: {second!r} is {one} in {other}, {two} in data.tokenizer" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distill.teacher": "/nowhere"}, "distill.teacher: '/nowhere' is not a directory"),
        ({"shard.backend": "stream"}, "distill: backend stream holds no teacher"),
        ({"shard.backend": "stream", "distill.hidden": "{}"}, "beside the model it trains; set shard.backend=ddp"),
        ({"distill.cache": "said", "distill.hidden": "{}"}, "hidden needs the teacher's hidden states, and cache"),
        ({"distill.hidden": "{layers: [[1, 4]]}"}, "the teacher has 3 blocks, and no block 4"),
        ({"distill.mixture": "0.5"}, "mixture is for jsd, skew_kl, skew_reverse_kl; forward_kl has none"),
        ({"distill.loss": "kl"}, "distill.loss"),
    ],
    ids=str,
)
def test_what_is_refused(teacher: Path, tmp_path: Path, change: dict[str, str], said: str) -> None:
    arguments = [argument for key, value in change.items() for argument in ("--set", f"{key}={value}")]
    assert said in refused(recipe_of(tmp_path, teacher), tmp_path / "run", *arguments)
