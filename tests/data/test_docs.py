"""The recipes of docs/data.md are prepared as they stand; each of its tables names what the code has."""

import json
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from shardlab.data import prepare_data
from shardlab.data.records import Problem
from shardlab.data.sources import UNREAD_SUFFIXES
from shardlab.recipe import DataSection, load_recipe
from tests.data.chat_tokenizer import save_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """The files that the page's recipes name."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/one.txt").write_text("a note about two plus two " * 20)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"body": "a text " * 20}) + "\n")
    pairs = [{"prompt": f"2+{number}=", "completion": str(2 + number)} for number in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "chats").mkdir()
    parquet.write_table(pa.table({"messages": [CHAT] * 30}), tmp_path / "chats/one.parquet")
    datasets.Dataset.from_dict({"messages": [CHAT] * 30}).save_to_disk(tmp_path / "saved-dataset")
    save_tokenizer(tmp_path / "my-model")
    return tmp_path


@pytest.mark.parametrize("block", RECIPES)
def test_the_pages_recipes_work(workplace, block):
    tree = yaml.safe_load(block)
    tree["data"] |= {"cache_dir": "cache"} | ({} if "tokenizer" in tree["data"] else {"tokenizer": "bytes"})
    (workplace / "recipe.yaml").write_text(yaml.safe_dump(tree))
    data = prepare_data(load_recipe(workplace / "recipe.yaml").data)
    window = next(iter(data.windows(global_batch_size=2, micro_batch=1, rank=0, world_size=1, seed=0, steps=1)))
    assert window.tokens > 0
    assert data.report.lines() == []


def test_the_page_names_every_problem_and_every_key():
    for problem in Problem:
        assert problem.value in PAGE
    for key in DataSection.model_fields.keys() - {"source", "cache_dir"}:
        assert re.search(rf"\b{key}\b", PAGE), key
    for suffix in (".json", ".csv", ".gz"):
        assert suffix in UNREAD_SUFFIXES
