"""Bad records are found before the first step, with file and line, and the recipe says what becomes of them."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.data import prepare_data
from shardlab.errors import UserError

GOOD = '{"text": "a good record"}'
B25_LINES: dict[str, bytes] = {  # what line it is on -> the line
    "empty": b'{"text": ""}',
    "whitespace only": b'{"text": " "}',
    "too long": b'{"text": "' + b"long " * 200_000 + b'"}',
    "not UTF-8": b'{"text": "caf\xc9 noir"}',
    "NUL": b'{"text": "a\\u0000b"}',
    "BOM": '\ufeff{"text": "after a mark"}'.encode(),
    "missing field": b'{"body": "elsewhere"}',
    "truncated": b'{"text": "cut o',
}


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """Write lines to a .jsonl file; the last has no line end."""

    def write(*lines: bytes | str, name: str = "bad.jsonl", end: bytes = b"\n") -> tuple[str, ...]:
        path = tmp_path / name
        path.write_bytes(end.join(line.encode() if isinstance(line, str) else line for line in lines))
        return (str(path),)

    return write


@pytest.fixture
def b25(write_lines) -> tuple[str, ...]:
    """Every kind of bad record, one line each, good ones before and between; a good line with CRLF is line 2."""
    first, *rest = B25_LINES.values()
    return write_lines(GOOD, GOOD + "\r", first, GOOD, *rest)


def _lines(problems: dict[str, int], places: dict[str, tuple[str, ...]]) -> dict[str, int]:
    assert set(problems.values()) == {1}
    return {problem: int(place.split(" ")[0].rsplit(":", 1)[1]) for problem, (place,) in places.items()}


def _texts(data) -> list[str]:
    stream = data.train.stream
    starts = stream.ends - stream.lengths
    return [data.tokenizer.decode(stream.tokens[s : e - 1].tolist()) for s, e in zip(starts, stream.ends, strict=True)]


B25_PLACES = {name: number for number, name in zip([3, *range(5, 12)], B25_LINES, strict=True)}


def test_each_bad_record_is_reported_with_its_line_and_refused(b25, section):
    """https://github.com/luyug/COIL/issues/7, https://github.com/nshepperd/gpt-2/pull/39"""
    with pytest.raises(UserError) as caught:
        prepare_data(section(b25))
    complaint = str(caught.value)
    assert "8 of 11 records are bad" in complaint
    assert "\n" not in complaint
    for problem, line in B25_PLACES.items():
        assert f"1 {problem} ({b25[0]}:{line}" in complaint
    assert "data.on_bad_record" in complaint


def test_skipped_records_are_counted_and_the_others_learned(b25, section):
    """https://github.com/openai/gpt-2-output-dataset/issues/51"""
    data = prepare_data(section(b25, on_bad_record="skip", evaluation_fraction=0.0))
    assert _texts(data) == ["a good record"] * 3
    report = data.report
    assert (report.records, report.documents, report.mended) == (11, 3, 0)
    assert _lines(report.problems, report.places) == B25_PLACES


def test_mended_records_are_learned(b25, section):
    """https://github.com/Morizeyao/GPT2-Chinese/issues/42"""
    data = prepare_data(section(b25, on_bad_record="replace", evaluation_fraction=0.0))
    good = "a good record"
    assert _texts(data) == [good, good, good, "caf\ufffd noir", "ab", "after a mark"]
    assert (data.report.documents, data.report.mended, len(data.report.problems)) == (6, 3, 8)


def test_a_bytes_record_of_the_case_is_not_utf8(write_lines, section):
    """https://github.com/luyug/COIL/issues/7"""
    with pytest.raises(UserError, match=r"1 not UTF-8 \(.*bad\.jsonl:2 invalid continuation byte at byte 10\)"):
        prepare_data(section(write_lines(GOOD, b'{"text": "\xc9 "}')))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "1 empty"),
        ("  ", "1 whitespace only"),
        ("[1]", "1 invalid JSON (FILE:1 not an object)"),
        ("{", "1 invalid JSON"),
        ("[" * 100_000, "1 invalid JSON"),
        ("1" * 5000, "1 invalid JSON"),
        ('{"text": null}', "1 missing field (FILE:1 'text' is null)"),
        ('{"text": 5}', "1 wrong type (FILE:1 'text' is a number, not text)"),
        ('{"text": "\\ud800"}', "1 not UTF-8 (FILE:1 lone surrogate at character 0)"),
        ('{"text": "\\ufeffx"}', "1 BOM"),
        ('{"content": "x", "id": 1}', "1 missing field (FILE:1 'text' is missing; it has 'content', 'id')"),
    ],
)
def test_what_is_wrong_is_named(write_lines, section, line, problem):
    files = write_lines(line, GOOD)
    with pytest.raises(UserError) as caught:
        prepare_data(section(files))
    assert problem.replace("FILE", files[0]) in str(caught.value)


def test_half_a_surrogate_pair_is_mended(write_lines, section):
    files = write_lines('{"text": "a\\ud800b"}', GOOD)
    data = prepare_data(section(files, on_bad_record="replace", evaluation_fraction=0.0))
    assert _texts(data)[0] == "a\ufffdb"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_line_ends_of_either_kind_and_none_at_the_end_are_fine(write_lines, section, end):
    lines = [json.dumps({"text": f"record {number}\r\nof two lines"}) for number in range(3)]
    data = prepare_data(section(write_lines(*lines, end=end), evaluation_fraction=0.0))
    assert _texts(data) == [f"record {number}\r\nof two lines" for number in range(3)]
    assert data.report.lines() == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_a_line_may_be_as_long_as_the_recipe_says_and_no_longer(write_lines, section, end, last):
    lines = [GOOD, GOOD[:-1] + " }"] if last else [GOOD[:-1] + " }", GOOD]
    recipe = section(
        write_lines(*lines, end=end), max_record_bytes=len(GOOD), on_bad_record="skip", evaluation_fraction=0.0
    )
    data = prepare_data(recipe)
    assert _texts(data) == ["a good record"]
    assert _lines(data.report.problems, data.report.places) == {"too long": 2 if last else 1}


def test_jsonl_is_never_read_as_plain_text(write_lines, section):
    data = prepare_data(section(write_lines(GOOD, name="records.ndjson"), evaluation_fraction=0.0))
    assert _texts(data) == ["a good record"]
    for name in ("records.json", "table.csv", "records.jsonl.gz"):
        with pytest.raises(UserError, match="files are not read"):
            prepare_data(section(write_lines(GOOD, name=name)))


def test_of_a_thousand_bad_records_the_first_few_are_named_and_all_counted(write_lines, section):
    files = write_lines(*["{}"] * 1000, GOOD)
    with pytest.raises(UserError) as caught:
        prepare_data(section(files))
    assert "1000 missing field" in str(caught.value)
    assert len(str(caught.value)) < 1000
    report = prepare_data(section(files, on_bad_record="skip", evaluation_fraction=0.0)).report
    assert (report.problems, len(report.places["missing field"])) == ({"missing field": 1000}, 20)


def test_positions_stay_within_the_sequence_however_long_the_record(write_lines, section):
    """https://github.com/huggingface/transformers/issues/2446"""
    files = write_lines(json.dumps({"text": "long " * 200_000}), GOOD)
    settings = {"sequence_length": 64, "evaluation_fraction": 0.0, "max_record_bytes": 2_000_000}
    for packing in (True, False):
        rows = prepare_data(section(files, packing=packing, **settings)).train
        batch = rows.batch(range(min(len(rows), 100)))
        assert batch["position_ids"].max() == 63
        assert batch["input_ids"].shape[1] == 64


def test_memory_does_not_grow_with_a_line(write_lines, section, tmp_path):
    """A line of 64 MB: a megabyte of it is looked at, the rest only read past."""
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(GOOD.encode() + b'\n{"text": "')
        for _ in range(64):
            file.write(b"long line " * 100_000)
        file.write(b'"}\n' + GOOD.encode())
    recipe = section((str(path),), on_bad_record="skip", evaluation_fraction=0.0)
    prepare_data(section(write_lines(GOOD)))  # what is imported and allocated once
    tracemalloc.start()
    data = prepare_data(recipe)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert _lines(data.report.problems, data.report.places) == {"too long": 2}
    assert peak < 8 << 20


def test_evaluation_files_are_looked_at_too(write_lines, section):
    train, held = write_lines(GOOD), write_lines("{}", GOOD, name="held.jsonl")
    with pytest.raises(UserError, match=r"^data\.evaluation_files: 1 of 2 records are bad"):
        prepare_data(section(train, evaluation_files=held))
