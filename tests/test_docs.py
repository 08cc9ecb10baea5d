"""What the README and the docs say is run or compared, so that it stays true."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the README's snippets run one after another, as a reader's would."""
    return tmp_path_factory.mktemp("readme")


def run(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_readmes_snippets_run_in_order(workplace: Path) -> None:
    for script in blocks("bash"):
        run(["bash", "-euo", "pipefail", "-c", script], workplace)
    assert (workplace / "runs/small/model/config.json").is_file()
    for number, snippet in enumerate(blocks("python")):
        file = workplace / f"snippet_{number}.py"
        file.write_text(snippet, encoding="utf-8")
        run([sys.executable, file.name], workplace)
    assert (workplace / "my-model/model.safetensors").is_file()


def test_the_readmes_recipes_are_valid() -> None:
    import yaml

    from shardlab.recipe import Recipe

    for block in blocks("yaml"):
        Recipe.from_dict(yaml.safe_load(block))


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
