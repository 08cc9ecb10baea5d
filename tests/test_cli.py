"""The command line: help, exit codes, one-line errors, and the commands on a tiny trained model."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardlab as package
from shardlab.cli import app
from shardlab.data.packing import pack
from shardlab.recipe import DistillSection, Recipe, load_recipe
from shardlab.train.compare import Row, table
from tests.train.support import COMMAND, REPOSITORY, run_process, shardlab, write_recipe

HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "datasets", "pyarrow", "numpy"}


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """("train",), ("data", "inspect"), ...: what can be run."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = sorted(_commands(typer.main.get_command(app)))
UNTOLD = {"cache_dir"}  # keys that the template leaves out


def test_the_commands_are_these() -> None:
    assert set(COMMANDS) >= {("init",), ("train",), ("compare",), ("eval",), ("generate",)}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    ended = shardlab(*command, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert f"shardlab {' '.join(command)}" in " ".join(ended.out.replace("│", " ").split())


def test_help_names_every_command() -> None:
    ended = shardlab("--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert command[0] in ended.out
    assert "local" not in ended.out, "what deepspeed adds is not for people"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys; from shardlab.cli import main\n"
        f"sys.argv = ['shardlab', *{arguments!r}]\n"
        "try: main()\nexcept SystemExit as exit_: assert not exit_.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout
    assert set(done.stderr.split()) & HEAVY == set()


def test_the_module_is_the_same_program() -> None:
    ended = run_process([*COMMAND, "--version"])
    assert (ended.code, ended.out) == (0, f"shardlab {package.__version__}\n")
    assert shardlab("--version").out == ended.out


def test_a_rank_number_from_deepspeed_is_accepted_before_the_command(tmp_path: Path) -> None:
    assert shardlab("--local_rank=0", "init", tmp_path / "a.yaml").code == 0
    assert shardlab("--local-rank", "1", "init", tmp_path / "b.yaml").code == 0


@pytest.mark.parametrize(
    "arguments", [["trian"], ["train"], ["train", "r.yaml", "--stpes=3"], ["train", "r", "--nproc=0"]]
)
def test_a_misspelled_command_line_ends_with_code_2(arguments: list[str]) -> None:
    ended = shardlab(*arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_init_writes_the_defaults_and_never_overwrites(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    ended = shardlab("init", file)
    assert (ended.code, ended.out) == (0, f"wrote {file}; next: shardlab train {file}\n")
    assert load_recipe(file) == Recipe()
    file.write_text("mine")
    assert shardlab("init", file).error == f"{file} exists; it is not overwritten. Give another name"
    assert file.read_text() == "mine"
    assert "can't be written" in shardlab("init", tmp_path / "no" / "such" / "directory.yaml").error


def test_the_template_has_every_key(tmp_path: Path) -> None:
    """Also those that stand commented out."""
    shardlab("init", tmp_path / "my.yaml")
    text = (tmp_path / "my.yaml").read_text()
    for section, keys in Recipe().model_dump().items():
        assert f"\n{section}:" in f"\n{text}"
        assert {key for key in keys or DistillSection.model_fields if f" {key}:" not in text} <= UNTOLD


Change = dict[str, dict[str, Any]]

MISTAKES: dict[str, tuple[Change, list[str], str]] = {
    "an unknown key": ({"train": {"stpes": 3}}, [], "did you mean steps?"),
    "a wrong type": ({}, ["--set=train.steps=ten"], "train.steps"),
    "half precision": ({}, ["--set=train.precision=fp16"], "fp16 is refused: it needs loss scaling"),
    "batches that don't multiply": ({}, ["--nproc=3"], "train.global_batch_size 4 is not a multiple of 3 ranks"),
    "another number of ranks": ({"shard": {"world_size": 2}}, [], "shard.world_size is 2, but this job has 1 rank"),
    "missing text": ({"data": {"files": ["nowhere/*.txt"]}}, [], "matches no file"),
    "an unknown tokenizer": ({"data": {"tokenizer": "nowhere"}}, [], "nowhere"),
    "a builder that is not there": ({"model": {"builder": "nowhere:model"}}, [], "model.builder: nowhere:model"),
    "a pattern without a match": ({"model": {"preset": "tiny", "freeze": ["no.*"]}}, [], "'no.*' matches no tensor"),
    "too long a sequence": ({"data": {"sequence_length": 4096}}, [], "set data.sequence_length=2048"),
    "a group without a match": (
        {"train": {"optimizer": {"groups": [{"pattern": "no.*", "lr": 0.1}]}}},
        [],
        "no trainable tensor is matched first by the pattern 'no.*'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_recipe_is_one_line_and_code_2(tmp_path: Path, mistake: str) -> None:
    changes, arguments, complaint = MISTAKES[mistake]
    ended = shardlab("train", write_recipe(tmp_path, **changes), "--output", tmp_path / "run", *arguments)
    assert complaint in ended.error
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: cannot read the recipe"),
        (["compare", "RECIPE", "--backends", "ddp,zero4"], "no backend 'zero4'; there are ddp, zero1"),
        (["compare", "RECIPE", "--nproc", "3"], "is not a multiple of 3 ranks"),
        (["eval", "nowhere", "--files", "RECIPE"], "nowhere"),
        (["generate", "nowhere", "--prompt", "def"], "is not a Hugging Face model directory"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    recipe = str(write_recipe(tmp_path))
    replaced = [recipe if argument == "RECIPE" else argument for argument in arguments]
    assert complaint in shardlab(*replaced).error


@pytest.mark.parametrize("command", [["train", "RECIPE"], ["train", "RECIPE", "--nproc=2"], ["compare", "RECIPE"]])
def test_without_deepspeed_zero_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1279: an ImportError, or worse, at start."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "deepspeed" else found(name, *more)
    )
    monkeypatch.chdir(tmp_path)
    recipe = str(write_recipe(tmp_path, shard={"backend": "zero2"}))
    ended = shardlab(*[recipe if part == "RECIPE" else part for part in command])
    assert ended.error.startswith("DeepSpeed is not installed: `pip install deepspeed`")
    assert "shard.backend: fsdp" in ended.error
    assert not (tmp_path / "runs").exists()


def test_nor_does_a_foreign_launcher_s_rank_show_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours has looked at the recipe before it."""
    from shardlab import Engine
    from shardlab.errors import UserError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    with pytest.raises(UserError, match="DeepSpeed is not installed"):
        Engine.from_recipe(write_recipe(tmp_path, shard={"backend": "zero3"}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a model that has learned the few words of its text, a little."""
    directory = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(directory, train={"steps": 30, "optimizer": {"lr": 1e-2}})
    ended = shardlab("train", recipe, "--output", directory / "run")
    assert ended.code == 0, ended.err
    return directory / "run"


Generate = Callable[..., str]


@pytest.fixture
def generate(trained: Path) -> Generate:
    def write_on(*options: str) -> str:
        ended = shardlab("generate", trained / "model", "--prompt", "alpha be", "--tokens", "12", *options)
        assert ended.code == 0, ended.err
        return ended.out

    return write_on


def test_generate_goes_on_from_the_prompt(generate: Generate, trained: Path) -> None:
    text = generate()
    assert text.startswith("alpha be")
    assert len(text) > len("alpha be\n")
    assert generate() == text
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(trained / "model"),
        AutoTokenizer.from_pretrained(trained / "model"),
    )
    ids = tokenizer("alpha be", return_tensors="pt").input_ids
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert text == tokenizer.decode(ids[0]) + "\n"


def test_sampling_follows_from_the_seed(generate: Generate) -> None:
    hot = ("--temperature", "5")
    assert generate(*hot, "--seed", "1") == generate(*hot, "--seed", "1")
    assert generate(*hot, "--seed", "1") != generate(*hot, "--seed", "2")


def test_an_empty_prompt_is_refused(trained: Path) -> None:
    assert "the prompt is empty" in shardlab("generate", trained / "model", "--prompt", "").error


@torch.no_grad()
def test_eval_measures_what_transformers_measures(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("gamma delta epsilon " * 20)
    arguments = ("eval", trained / "model", "--files", held_out, "--sequence-length", "32")
    told = json.loads(shardlab(*arguments, "--json").out)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(trained / "model"),
        AutoTokenizer.from_pretrained(trained / "model"),
    )
    rows = pack([[*tokenizer(held_out.read_text()).input_ids, tokenizer.eos_token_id]], 32, tokenizer.eos_token_id)
    logits = model(input_ids=rows["input_ids"], position_ids=rows["position_ids"], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten())
    assert told["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert told["perplexity"] == pytest.approx(math.exp(told["loss"]))
    assert told["tokens"] == 400
    assert f"loss {told['loss']:.4f}" in shardlab(*arguments).out


@pytest.mark.parametrize("name", ["bytes", "bpe-model"])
def test_a_model_directory_may_be_named_like_a_tokenizer(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to(trained / "model")
    Path("held-out.txt").write_text("gamma delta")
    assert shardlab("eval", name, "--files", "held-out.txt").code == 0


@pytest.mark.slow
def test_compare_shows_that_the_losses_agree(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    ended = run_process([*COMMAND, "compare", recipe, "--backends", "fsdp", "--output", tmp_path / "runs", "--json"])
    assert ended.code == 0, ended.err
    rows = [Row(**row) for row in json.loads(ended.out)]
    assert [(row.label, row.world_size) for row in rows] == [("one process", 1), ("fsdp x2", 2)]
    assert rows[0].largest_difference == 0
    assert 0 <= rows[1].largest_difference < 1e-4
    assert rows[1].loss == pytest.approx(rows[0].loss, rel=1e-5)
    assert all(row.tokens_per_second > 0 for row in rows)
    assert (tmp_path / "runs" / "fsdp-x2" / "model" / "config.json").is_file()
    header, first, second, note = table(rows).splitlines()
    assert header.split()[0] == "backend"
    assert first.startswith("one process")
    assert f"{rows[0].loss:.5f}" in first
    assert second.startswith("fsdp x2")
    assert f"{rows[1].largest_difference:.1e}" in second
    assert "above the libraries'" in note
    assert yaml.safe_load((tmp_path / "runs" / "fsdp-x2.yaml").read_text())["shard"]["backend"] == "fsdp"
