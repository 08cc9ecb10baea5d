"""The same records from JSONL, Parquet and saved datasets are the same documents."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from shardlab.data import prepare_data
from shardlab.data.corpus import files_corpus
from shardlab.errors import UserError

TEXTS = [f"record {number} é🎉\r\n" for number in range(150)]  # more than are read at once


def _jsonl(folder: Path, texts: list[str | None]) -> str:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    return str(path)


def _parquet(folder: Path, texts: list[str | None]) -> str:
    table = pa.table({"id": [1] * len(texts), "text": pa.array(texts, pa.string())})
    parquet.write_table(table, folder / "records.parquet", row_group_size=40)
    return str(folder / "records.parquet")


def _large_and_encoded(folder: Path, texts: list[str | None]) -> str:
    column = pa.array(texts, pa.large_string()).dictionary_encode()
    parquet.write_table(pa.table({"text": column}), folder / "encoded.parquet")
    return str(folder / "encoded.parquet")


def _saved(folder: Path, texts: list[str | None]) -> str:
    dataset = datasets.Dataset.from_dict({"text": [*texts, "not chosen"]}).select(range(len(texts)))
    dataset.save_to_disk(folder / "saved")
    return str(folder / "saved")


def _shuffled_back(folder: Path, texts: list[str | None]) -> str:
    """A dataset whose rows come through an index."""
    dataset = datasets.Dataset.from_dict({"text": texts[::-1]}).select(range(len(texts) - 1, -1, -1))
    dataset.save_to_disk(folder / "indexed")
    return str(folder / "indexed")


def _arrow(folder: Path, texts: list[str | None]) -> str:
    _saved(folder, texts)
    (file,) = (folder / "saved").glob("*.arrow")
    return str(file)


@pytest.mark.parametrize("write", [_jsonl, _parquet, _large_and_encoded, _saved, _shuffled_back, _arrow])
def test_each_kind_of_source_gives_the_same_documents(tmp_path, section, write: Callable[[Path, list[str]], str]):
    data = prepare_data(section((write(tmp_path, TEXTS),), evaluation_fraction=0.0))
    stream = data.train.stream
    found = [data.tokenizer.decode(ids[:-1]) for ids in _split(stream)]
    assert found == TEXTS
    assert data.documents == len(TEXTS)


def _split(stream) -> list[list[int]]:
    starts = stream.ends - stream.lengths
    return [stream.tokens[s:e].tolist() for s, e in zip(starts.tolist(), stream.ends.tolist(), strict=True)]


@pytest.mark.parametrize("write", [_jsonl, _parquet, _saved])
def test_bad_rows_are_named_by_their_number(tmp_path, section, write):
    source = write(tmp_path, ["good", None, "", "good"])
    with pytest.raises(UserError) as caught:
        prepare_data(section((source,)))
    assert f"1 empty ({source}:3 'text'); 1 missing field ({source}:2 'text' is null" in str(caught.value)


def test_bytes_in_a_tables_text_that_are_not_utf8_are_found(tmp_path, section):
    """Arrow does not look: the bytes of a string column are whatever was written.

    https://github.com/luyug/COIL/issues/7
    """
    offsets, values = pa.array([0, 2, 5], pa.int32()).buffers()[1], pa.py_buffer(b"okb\xc9 ")
    column = pa.StringArray.from_buffers(2, offsets, values)
    parquet.write_table(pa.table({"text": column}), tmp_path / "bad.parquet")
    source = str(tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"1 not UTF-8 \(.*bad\.parquet:2 invalid continuation byte at byte 1\)"):
        prepare_data(section((source,)))
    data = prepare_data(section((source,), on_bad_record="replace", evaluation_fraction=0.0))
    assert bytes(_split(data.train.stream)[1][:-1]).decode() == "b\ufffd "


def test_another_column_is_read_if_the_recipe_says_so(tmp_path, section):
    path = tmp_path / "r.jsonl"
    path.write_text('{"body": "text"}\n')
    data = prepare_data(section((str(path),), columns={"text": "body"}, evaluation_fraction=0.0))
    assert bytes(_split(data.train.stream)[0][:-1]) == b"text"


@pytest.mark.parametrize("write", [_parquet, _saved])
def test_a_column_that_a_table_lacks_is_named_with_those_it_has(tmp_path, section, write):
    with pytest.raises(UserError, match=r"has no column 'body' but (id, )?text; data\.columns says which to read"):
        prepare_data(section((write(tmp_path, ["x"]),), columns={"text": "body"}))


def test_a_dataset_with_splits_says_which_there_are(tmp_path, section):
    dataset = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match=r"holds the splits train, test; name one of them, such as .*both/train"):
        prepare_data(section((str(tmp_path / "both"),)))
    assert prepare_data(section((str(tmp_path / "both" / "train"),), evaluation_fraction=0.0)).documents == 1


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_damaged_table_is_named(tmp_path, section, name):
    (tmp_path / name).write_bytes(b"PAR1 no table")
    with pytest.raises(UserError, match=rf"{name} is not a"):
        prepare_data(section((str(tmp_path / name),)))


def test_kinds_can_be_mixed(tmp_path, section, write_text):
    files = (_jsonl(tmp_path, ["one"]), _parquet(tmp_path, ["two"]), *write_text("three"))
    data = prepare_data(section(files, evaluation_fraction=0.0))
    assert [bytes(ids[:-1]) for ids in _split(data.train.stream)] == [b"one", b"two", b"three"]


def test_memory_does_not_grow_with_a_parquet_file(tmp_path):
    """32 MB of text in one row group, in pages of 1 MB (a page is decoded whole, so that is the writer's choice)."""
    table = pa.table({"text": [f"{n} " * 5000 for n in range(100_000, 100_900)]})
    parquet.write_table(table, tmp_path / "big.parquet", use_dictionary=False, write_batch_size=16)
    del table
    corpus = files_corpus([str(tmp_path / "big.parquet")])
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most = max(pa.total_allocated_bytes() - before for _ in corpus.samples())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most + peak < 12 << 20
