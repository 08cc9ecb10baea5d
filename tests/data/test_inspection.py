"""What `shardlab data inspect` shows."""

import json
from pathlib import Path

import pytest
import yaml

from shardlab.data.inspection import inspect_data
from shardlab.errors import UserError
from shardlab.recipe import DataSection
from tests.data.chat_tokenizer import save_tokenizer
from tests.train.support import shardlab


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[str, ...]:
    """Forty pairs of 21 to 24 tokens, and a bad line."""
    lines = [json.dumps({"prompt": f"What is {n}+{n}? ", "completion": f"{2 * n} is it"}) for n in range(40)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join([*lines, '{"prompt": "cut']))
    return (str(path),)


@pytest.fixture
def recipe(tmp_path: Path, pairs: tuple[str, ...]) -> Path:
    data = {"files": list(pairs), "format": "instruct", "tokenizer": "bytes", "sequence_length": 48}
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump({"data": {**data, "evaluation_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}})
    )
    return path


def test_rows_show_documents_and_what_is_not_learned(section, pairs):
    found = inspect_data(section(pairs, format="instruct", sequence_length=64, evaluation_fraction=0.0), rows=2)
    assert len(found.samples) == 2
    for segments in found.samples:
        first, second = (segment for segment in segments if segment.document == 0)
        assert first.text.startswith("What is ")
        assert (first.learned, second.learned) == (False, True)
        assert second.text.endswith(" is it<|endoftext|>")
        assert segments[-1].padding
        assert sum(segment.tokens for segment in segments) == 64
    text = found.text("[{}]".format)
    assert "? ]" in text
    assert "── document 2 ──\n[What is" in text
    assert "── padding: " in text


def test_lengths_and_what_packing_saves(section, pairs):
    found = inspect_data(section(pairs, format="instruct", sequence_length=48, evaluation_fraction=0.0))
    assert found.lengths == [(16, 31, 40)]
    assert (found.packed.rows, found.padded.rows) == (20, 40)
    assert found.packed.targets == found.padded.targets
    assert found.padded.padding == pytest.approx(1 - found.tokens / (40 * 48))
    assert found.saved == pytest.approx(0.5)


def test_text_is_cut_into_rows_without_padding(section, write_text):
    found = inspect_data(section(write_text("a" * 99, "b" * 9), sequence_length=16, evaluation_fraction=0.0))
    assert found.lengths == [(8, 15, 1), (16, 31, 0), (32, 63, 0), (64, 127, 1)]
    assert (found.packed.rows, found.padded.rows, found.padded.truncated_documents) == (7, 2, 1)
    assert (found.packed.targets, found.padded.targets) == (108, 15 + 9)


@pytest.mark.parametrize("packing", [True, False])
def test_the_rows_shown_are_those_of_training(section, write_text, packing):
    found = inspect_data(section(write_text("some text", "more"), packing=packing, evaluation_fraction=0.0), rows=9)
    shown = "".join(segment.text for row in found.samples for segment in row if not segment.padding)
    assert sorted(shown.replace("<|endoftext|>", "|")) == sorted("some text|more|")


def test_a_stream_is_shown_by_its_first_chunk(section, pairs):
    found = inspect_data(
        section(pairs, format="instruct", sequence_length=64, evaluation_fraction=0.0, streaming=True), rows=1
    )
    assert found.documents == 40
    assert "of the first chunk of the stream" in found.text()


def test_the_command_names_bad_records_and_ends_as_training_would(recipe, pairs):
    ended = shardlab("data", "inspect", recipe, "--rows", "1")
    assert ended.error.startswith(f"data.files: 1 of 41 records are bad: 1 truncated ({pairs[0]}:41")
    assert f"truncated: 1  {pairs[0]}:41" in ended.out
    assert "packing saves 50.0%" in ended.out
    assert "⟦What is" in ended.out
    assert shardlab("data", "inspect", recipe, "--set", "data.on_bad_record=skip").code == 0


def test_the_command_in_json(recipe):
    ended = shardlab("data", "inspect", recipe, "--json", "--rows", "1", "--set", "data.on_bad_record=skip")
    found = json.loads(ended.out)
    assert found["report"]["problems"] == {"truncated": 1}
    assert found["saved_by_packing"] == pytest.approx(0.5)
    assert {segment["learned"] for segment in found["samples"][0]} == {True, False}


def test_rows_of_a_users_own_are_not_shown():
    with pytest.raises(UserError, match=r"data\.builder brings rows of its own"):
        inspect_data(DataSection(builder="package.module:rows"))


def test_a_conversation_shows_its_template(tmp_path, section):
    save_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    found = inspect_data(
        section(
            (str(tmp_path / "chats.jsonl"),),
            format="chat",
            tokenizer=str(tmp_path / "tokenizer"),
            sequence_length=64,
            evaluation_fraction=0.0,
        )
    )
    texts = [(segment.text, segment.learned) for segment in found.samples[0][:2]]
    assert texts == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello<|im_end|>\n", True),
    ]
