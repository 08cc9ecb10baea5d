"""A stream's windows are those of a corpus, chunk by chunk, the same on every rank and at every world size."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch

from shardlab.data import IGNORED, StreamedText, StreamLoader, Window, prepare_data
from shardlab.errors import UserError

FORMATS = ["text", "padded text", "instruct"]


@pytest.fixture
def streamed(tmp_path, section):
    """A stream in chunks of 400 tokens: six files, 60 records, documents of many lengths, one of 900 tokens."""

    def make(kind: str, chunk_tokens: int = 400) -> StreamedText:
        files = []
        for number in range(6):
            path = tmp_path / f"{number}.jsonl"
            records = [
                {
                    "prompt": f"{number}.{row}:",
                    "completion": "ab" * (row + 1),
                    "text": f"{number}.{row}:" + "xy" * row * 2,
                }
                for row in range(10)
            ]
            records += [{"prompt": "long", "completion": "z" * 900, "text": "long " * 180}] * (number == 3)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            files.append(str(path))
        fields = {"format": "instruct"} if kind == "instruct" else {"packing": kind == "text"}
        data = prepare_data(section(tuple(files), streaming=True, evaluation_fraction=0.0, **fields))
        assert isinstance(data.train, StreamedText)
        assert data.train_tokens is None
        data.train._chunk_tokens = chunk_tokens
        return data.train

    return make


def _loader(
    text: StreamedText, rank: int = 0, world_size: int = 1, micro_batch: int = 4, **fields: int
) -> StreamLoader:
    settings = {"global_batch_size": 8, "seed": 3, "steps": 12, **fields}
    return StreamLoader(text, rank=rank, world_size=world_size, micro_batch=micro_batch, **settings)


def _global(windows: list[Window], key: str) -> torch.Tensor:
    micro_batches = sorted((micro for window in windows for micro in window.micro_batches), key=lambda m: m.index)
    assert [micro.index for micro in micro_batches] == list(range(len(micro_batches)))
    return torch.cat([micro.tensors[key] for micro in micro_batches])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_steps_batch_does_not_depend_on_ranks_and_micro_batch(streamed, kind):
    text = streamed(kind)
    whole = list(_loader(text, micro_batch=8))
    for world_size, micro_batch in ((2, 2), (4, 1), (2, 4)):
        ranks = [_loader(text, rank, world_size, micro_batch) for rank in range(world_size)]
        for expected, *windows in zip(whole, *ranks, strict=True):
            assert {window.step for window in windows} == {expected.step}
            assert {window.tokens for window in windows} == {expected.tokens}
            for key, values in expected.micro_batches[0].tensors.items():
                assert torch.equal(_global(windows, key), values)


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_count_the_targets_of_the_global_batch(streamed, kind):
    """https://github.com/huggingface/trl/issues/2175"""
    for window in _loader(streamed(kind)):
        assert window.tokens == int((_global([window], "targets") != IGNORED).sum()) > 0


@pytest.mark.parametrize("start_step", [1, 7, 12])
def test_a_resumed_loader_goes_on_where_the_other_was(streamed, start_step):
    text = streamed("text")
    resumed, expected = _loader(text, start_step=start_step), list(_loader(text))[start_step:]
    assert len(resumed) == len(expected)
    for one, other in zip(resumed, expected, strict=True):
        assert (one.step, one.tokens) == (other.step, other.tokens)
        assert torch.equal(_global([one], "input_ids"), _global([other], "input_ids"))


def test_lives_at_other_world_sizes_take_the_straight_runs_rows(streamed):
    """https://github.com/huggingface/datasets/issues/7538: every rank saw the whole stream after the second resume."""
    text, taken = streamed("text"), []
    for start, stop, world_size, micro_batch in ((0, 3, 2, 2), (3, 5, 4, 1), (5, 12, 1, 4)):
        ranks = [_loader(text, rank, world_size, micro_batch, start_step=start) for rank in range(world_size)]
        lives = [_global(list(windows), "input_ids") for windows in zip(*ranks, strict=True)]
        taken += lives[: stop - start]
    assert torch.equal(torch.cat(taken), torch.cat([_global([window], "input_ids") for window in _loader(text)]))


def test_an_epoch_has_every_token_once_but_for_one_at_each_chunks_border(streamed):
    text = streamed("text")
    chunks = list(text.chunks(0, seed=3))
    assert len(chunks) > 3
    streams = [chunk.stream for chunk in chunks]
    assert all(len(stream.tokens) <= 400 for stream in streams)
    found = bytes(token for stream in streams for token in stream.tokens.tolist() if token != 256)
    expected = [f"{number}.{row}:" + "xy" * row * 2 for number in range(6) for row in range(10)]
    assert sorted(found.decode()) == sorted("".join(expected) + "long " * 180)
    targets = sum(chunk.valid_tokens(range(len(chunk))) for chunk in chunks)
    assert len(found) - len(chunks) <= targets <= len(found)


def test_each_epoch_and_seed_has_its_own_order_and_the_same_text(streamed):
    text = streamed("instruct")
    rows = {}
    for epoch, seed in ((0, 3), (1, 3), (0, 4)):
        batches = [chunk.batch(range(len(chunk)))["input_ids"] for chunk in text.chunks(epoch, seed)]
        rows[epoch, seed] = torch.cat(batches).tolist()
    assert len({str(order) for order in rows.values()}) == 3
    tokens = {str(sorted(token for row in order for token in row if token != 256)) for order in rows.values()}
    assert len(tokens) == 1


@pytest.mark.parametrize("kind", ["padded text", "instruct"])
def test_what_a_stream_cuts_and_leaves_out_is_counted_once_for_each_document(streamed, kind, tmp_path, section):
    text = streamed(kind)
    for epoch in range(2):
        list(text.chunks(epoch, seed=3))
    files = tuple(str(tmp_path / f"{number}.jsonl") for number in range(6))
    fields = {"format": "instruct"} if kind == "instruct" else {"packing": False}
    cached = prepare_data(section(files, evaluation_fraction=0.0, **fields)).train
    for name in ("masked_documents", "truncated_documents", "truncated_tokens"):
        assert getattr(text, name) == getattr(cached, name)
    assert text.truncated_documents > 0


@pytest.mark.slow
def test_memory_holds_a_chunk_and_no_more(tmp_path, section):
    """8 MB of text as one document: eight million tokens, in chunks of 50,000."""
    path = tmp_path / "large.txt"
    with path.open("w") as file:
        for number in range(80):
            file.write(f"line {number:07} of it\n" * 5000)
    text = prepare_data(section((str(path),), streaming=True, evaluation_fraction=0.0)).train
    text._chunk_tokens = 50_000
    loader = _loader(text, global_batch_size=1000, micro_batch=4, rank=0, world_size=250, steps=500)
    tracemalloc.start()
    assert sum(window.tokens for window in loader) > 7_900_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20  # 64 MB as ids of 8 bytes


def test_nothing_is_written_but_the_reports(tmp_path, section, write_text):
    prepare_data(section(write_text("text"), streaming=True, evaluation_fraction=0.0))
    assert not (tmp_path / "cache" / "tokens").exists()


def test_evaluation_files_are_tokenised_before(section, write_text):
    held = write_text("held out", directory="held")
    data = prepare_data(section(write_text("text"), streaming=True, evaluation_files=held))
    assert data.evaluation_tokens == len("held out") + 1


def test_a_fraction_of_a_stream_is_refused(section, write_text):
    with pytest.raises(ValueError, match="streaming can't hold out a fraction of what it has not read"):
        section(write_text("text"), streaming=True)


def test_a_stream_without_a_target_is_refused(tmp_path, section):
    path = Path(tmp_path / "long.jsonl")
    path.write_text(json.dumps({"prompt": "long " * 50, "completion": "x"}) + "\n")
    text = prepare_data(section((str(path),), format="instruct", streaming=True, evaluation_fraction=0.0)).train
    with pytest.raises(UserError, match="no document has a token to learn"):
        next(iter(_loader(text)))
