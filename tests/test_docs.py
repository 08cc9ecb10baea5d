"""What the README and the docs say is run or compared, so that it stays true."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import shardlab

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def blocks_of(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


class Workplace:
    """A directory in which snippets run one after another, as a reader's would; a line that two pages share runs once.

    `my.yaml` is what `shardlab init` writes, but for a smaller batch.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._said: dict[str, str] = {}

    def follow(self, script: str) -> str:
        """What its commands say."""
        lines = script.splitlines()
        for line in lines:
            if line not in self._said:
                self._said[line] = run(["bash", "-euo", "pipefail", "-c", line], self.directory)
                if line.startswith("shardlab init"):
                    recipe = self.directory / "my.yaml"
                    written = recipe.read_text(encoding="utf-8")
                    assert "global_batch_size: 32 " in written
                    recipe.write_text(written.replace("global_batch_size: 32 ", "global_batch_size: 8 "))
        return "".join(self._said[line] for line in lines)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The README's; the page about checkpoints goes on from there."""
    return Workplace(tmp_path_factory.mktemp("readme"))


def run(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_the_readmes_snippets_run_in_order(workplace: Workplace) -> None:
    directory = workplace.directory
    for script in blocks("bash"):
        workplace.follow(script)
    assert (directory / "runs/small/model/config.json").is_file()
    for number, snippet in enumerate(blocks("python")):
        file = directory / f"snippet_{number}.py"
        file.write_text(snippet, encoding="utf-8")
        run([sys.executable, file.name], directory)
    assert (directory / "my-model/model.safetensors").is_file()


def test_the_readmes_recipes_are_valid() -> None:
    for block in blocks("yaml"):
        _valid(block)


def test_the_readmes_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    source = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", source.read_text(encoding="utf-8")):
        assert (source.parent / target).exists(), f"{page} links to {target}"


def test_the_recipe_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("generate_recipe", ROOT / "docs/generate_recipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/generate_recipe.py"


@pytest.mark.usefixtures("preloaded")
def test_the_own_loops_script_learns_the_same_before_and_after_its_five_lines(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (diff,) = blocks_of("own-loop.md", "diff")
    recipe, groups = blocks_of("own-loop.md", "yaml")
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) == 5
    printed, weights = [], []
    for other, own in (("+", "-"), ("-", "+")):
        directory = tmp_path / own
        directory.mkdir()
        (directory / "my.yaml").write_text(recipe, encoding="utf-8")
        script = "\n".join(line[1:] for line in lines if not line.startswith(other))
        (directory / "script.py").write_text(script, encoding="utf-8")
        said = run([sys.executable, "script.py"], directory)  # DeepSpeed, if transformers imports it, has its say too
        printed.append([float(loss) for loss in re.findall(r"^\d+\.\d{6}$", said, flags=re.MULTILINE)])
        weights.append(load_file(directory / "my-model/model.safetensors"))
    plain, ours = printed
    assert len(plain) == 8
    assert ours == pytest.approx(plain, rel=1e-5)
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert (weights[1][name] - value).norm() <= 1e-5 * value.norm(), name
    _valid(groups)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_the_watching_pages_snippets_work(tmp_path: Path) -> None:
    (recipe,) = blocks_of("watching.md", "yaml")
    (snippet,) = blocks_of("watching.md", "python")
    _valid(recipe)
    (tmp_path / "text.txt").write_text("alpha beta gamma " * 400, encoding="utf-8")
    small = (
        "data: {files: [text.txt], tokenizer: bytes, sequence_length: 32, cache_dir: cache, evaluation_fraction: 0.1}"
    )
    train = "train: {steps: 4, global_batch_size: 4, precision: fp32, evaluate_every: 2}"
    (tmp_path / "my.yaml").write_text(f"model: {{preset: tiny}}\n{small}\n{train}\n", encoding="utf-8")
    (tmp_path / "watched.py").write_text(snippet, encoding="utf-8")
    run([sys.executable, "watched.py"], tmp_path)
    assert (tmp_path / "runs/watched/model/model.safetensors").is_file()


def shipped_figures() -> dict[str, Any]:
    """Of the machine whose rates come with shardlab, kept as if they were this one's."""
    from shardlab.planner import calibration

    shipped = resources.files("shardlab.planner").joinpath("calibration.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(shipped)
    calibration.write({name: figures[name] for name in ("accelerator", "load", "ranks", "disk")})
    return figures


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_the_planning_pages_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardlab.doctor import calibrate

    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))  # this machine's own calibration is left alone
    (tmp_path / "text.txt").write_text("alpha beta gamma " * 400, encoding="utf-8")
    data = "data: {files: [text.txt], tokenizer: bytes, sequence_length: 32}"
    train = "train: {steps: 2, global_batch_size: 16, precision: fp32}"
    (tmp_path / "recipe.yaml").write_text(f"model: {{preset: tiny}}\n{data}\n{train}\n", encoding="utf-8")
    (tmp_path / "my-model").mkdir()
    config = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
    config += '"num_attention_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096}'
    (tmp_path / "my-model/config.json").write_text(config, encoding="utf-8")
    planning, trying = blocks_of("planning.md", "bash")
    assert "fastest that fits" in run(["bash", "-euo", "pipefail", "-c", planning], tmp_path)
    calibration, *trying = trying.splitlines()
    monkeypatch.setattr(calibrate, "calibrate", shipped_figures)  # the measuring is tests/doctor/test_calibrate.py's
    ended = shardlab(*shlex.split(calibration, comments=True)[1:])
    assert ended.code == 0, ended.err
    assert f"kept in {tmp_path / 'cache/calibration.json'}" in ended.out
    said = run(["bash", "-euo", "pipefail", "-c", "\n".join(trying)], tmp_path)
    assert "wrote recipe-tuned.yaml" in said
    assert (tmp_path / "runs/recipe-tuned/model/config.json").is_file()


@pytest.mark.usefixtures("preloaded")
def test_the_export_pages_command_works(tmp_path: Path) -> None:
    from tests.export.models import bpe_tokenizer, needs, save_model

    needs("gguf", "cyllama", "onnx", "onnxscript", "onnxruntime")
    save_model(tmp_path / "my-model", "llama", bpe_tokenizer(280), 320, max_position_embeddings=512)
    _write_texts(tmp_path / "texts")
    for script in blocks_of("export.md", "bash"):
        said = run(["bash", "-euo", "pipefail", "-c", script], tmp_path)
    assert (tmp_path / "model.gguf").is_file()
    assert (tmp_path / "for-onnxruntime" / "model.onnx").is_file()
    assert "times as fast" in said


@pytest.mark.usefixtures("preloaded")
def test_the_compress_pages_commands_work(tmp_path: Path) -> None:
    from tests.export.models import bpe_tokenizer, save_model

    save_model(tmp_path / "my-model", "llama", bpe_tokenizer(280), 320)
    _write_texts(tmp_path / "texts")
    for script in blocks_of("compress.md", "bash"):
        if "shardlab fit" in script:  # tests/export/test_fit.py, on a text that is not the standard library
            continue
        small = script.replace(" --files", " --held-out 8 --calibration 8 --files")  # of each command
        # The model here has two blocks and 64 positions.
        small = small.replace("--layers 6 --set train.steps=2000", "--layers 1 --set train.steps=2")
        said = run(["bash", "-euo", "pipefail", "-c", small], tmp_path)
    assert "held-out tokens" in said
    for recipe in blocks_of("compress.md", "yaml"):
        _valid(recipe)
    assert (tmp_path / "mixed" / "shardlab_card.json").is_file()
    assert (tmp_path / "half" / "model" / "shardlab_card.json").is_file()


def _write_texts(directory: Path) -> None:
    directory.mkdir()
    for number in range(30):
        lines = "".join(f"line {line} of text {number}\n" for line in range(40))
        (directory / f"{number}.txt").write_text(lines, encoding="utf-8")


def _valid(text: str) -> None:
    import yaml

    from shardlab.recipe import Recipe

    Recipe.from_dict(yaml.safe_load(text))


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_the_checkpoint_pages_snippets_work(workplace: Workplace) -> None:
    workplace.follow(blocks("bash")[0].splitlines()[0])
    (recipe,) = blocks_of("checkpoints.md", "yaml")
    (script,) = blocks_of("checkpoints.md", "bash")
    (snippet,) = blocks_of("checkpoints.md", "python")
    _valid(recipe)
    said = workplace.follow(script)
    assert "resumed from runs/long/checkpoints/step-00000005: step 5, saved by ddp" in said
    before = blocks("python")[0].split("engine = ")[0]
    (workplace.directory / "mine.py").write_text(before + snippet, encoding="utf-8")
    run([sys.executable, "mine.py"], workplace.directory)
