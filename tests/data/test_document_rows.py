from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab.data import IGNORED, evaluation_batches, prepare_data, shifted
from shardlab.data.document_rows import DocumentRows, best_fit
from shardlab.data.tokens import TokenStream
from shardlab.data.windows import WindowLoader
from tests.data.chat_tokenizer import build_tokenizer
from tests.train.support import TINY

EOS = 2
DOCUMENT = st.lists(st.tuples(st.integers(3, 60), st.booleans()), min_size=1, max_size=14)  # (token, learned)
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=12)


def _stream(documents: list[list[tuple[int, bool]]]) -> TokenStream:
    flat = [pair for document in documents for pair in document]
    bits = np.packbits([learned for _, learned in flat], bitorder="little")
    ends = np.cumsum([len(document) for document in documents])
    return TokenStream(np.array([token for token, _ in flat], dtype=np.uint16), ends, bits)


def _plain(documents: list[list[int]]) -> TokenStream:
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    return TokenStream(tokens, np.cumsum([len(document) for document in documents]))


def _expected(document: list[tuple[int, bool]], length: int) -> tuple[list[int], list[int]]:
    """(inputs, targets) of one document, from the definition."""
    cut = document[:length]
    inputs = [token for token, _ in cut]
    targets = [token if learned else IGNORED for token, learned in cut[1:]] + [IGNORED]
    return inputs, targets


@pytest.mark.parametrize("packed", [False, True])
@given(documents=DOCUMENTS, length=st.integers(1, 20))
def test_rows_are_whole_documents_cut_to_the_sequence(packed, documents, length):
    rows = DocumentRows(_stream(documents), sequence_length=length, padding=EOS, packed=packed)
    expected = [_expected(document, length) for document in documents]
    kept = [pair for pair in expected if any(target != IGNORED for target in pair[1])]
    assert rows.masked_documents == len(documents) - len(kept)
    assert rows.truncated_documents == sum(len(document) > length for document in documents)
    assert rows.truncated_tokens == sum(max(len(document) - length, 0) for document in documents)
    found = []
    for row in range(len(rows)):
        batch = {key: values[0].tolist() for key, values in rows.batch([row]).items()}
        inputs, targets, positions = (batch[key] for key in ("input_ids", "targets", "position_ids"))
        starts = [at for at, position in enumerate(positions) if position == 0] + [length]
        spans = list(pairwise(starts))
        assert positions == [at for start, end in spans for at in range(end - start)]
        parts = [(inputs[start:end], targets[start:end]) for start, end in spans]
        if parts[-1][1] == [IGNORED] * len(parts[-1][1]):
            assert set(parts.pop()[0]) == {EOS}  # the padding, a document of its own
        assert parts
        assert packed or len(parts) == 1
        found += parts
    assert sorted(found) == sorted(kept)


@pytest.mark.parametrize("packed", [False, True])
@given(documents=DOCUMENTS, length=st.integers(1, 20), data=st.data())
def test_valid_tokens_are_the_targets_that_count(packed, documents, length, data):
    rows = DocumentRows(_stream(documents), sequence_length=length, padding=EOS, packed=packed)
    indices = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=8))
    assert rows.valid_tokens(indices) == int((rows.batch(indices)["targets"] != IGNORED).sum())


def test_targets_are_counted_the_same_in_many_pieces(monkeypatch):
    generator = np.random.default_rng(0)
    documents = [
        [(5, bool(flag)) for flag in generator.integers(0, 2, size=size)]
        for size in generator.integers(1, 40, size=200)
    ]
    whole = DocumentRows(_stream(documents), sequence_length=16, padding=EOS, packed=False)
    monkeypatch.setattr("shardlab.data.document_rows._COUNTED_TOKENS", 50)
    pieces = DocumentRows(_stream(documents), sequence_length=16, padding=EOS, packed=False)
    assert len(whole) == len(pieces)
    assert [whole.valid_tokens([row]) for row in range(len(whole))] == [
        pieces.valid_tokens([row]) for row in range(len(whole))
    ]


def test_the_end_token_is_learned_though_it_is_the_padding_too():
    """Pad id = eos id = 2: masked is what lies behind the document, never what has that id.

    https://github.com/huggingface/trl/issues/1623
    """
    batch = DocumentRows(_plain([[5, 6, 2]]), sequence_length=5, padding=2, packed=False).batch([0])
    labels = [batch["input_ids"][0, 0].item(), *batch["targets"][0].tolist()][:5]  # in transformers' terms: not shifted
    assert batch["input_ids"].tolist() == [[5, 6, 2, 2, 2]]
    assert labels == [5, 6, 2, -100, -100]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def test_rows_without_a_target_are_dropped_and_counted():
    """The answers of the first 4 of 16 lie beyond the cut.

    https://github.com/huggingface/trl/issues/6668
    """
    masked = [(9, False)] * 8 + [(5, True), (EOS, True)]
    good = [(9, False)] * 3 + [(5, True), (EOS, True)]
    for packed in (False, True):
        stream = _stream([masked] * 4 + [good] * 12)
        rows = DocumentRows(stream, sequence_length=8, padding=EOS, packed=packed)
        assert rows.masked_documents == 4
        loader = WindowLoader(rows, global_batch_size=4, micro_batch=4, rank=0, world_size=1, seed=0, steps=4)
        assert all(window.tokens >= 4 for window in loader)
    assert len(DocumentRows(stream, sequence_length=8, padding=EOS, packed=False)) == 12


@pytest.mark.parametrize("index", [-2, 1])
def test_a_row_that_does_not_exist_is_refused(index):
    rows = DocumentRows(_plain([[5, 6, 2]]), sequence_length=5, padding=EOS, packed=False)
    with pytest.raises(IndexError):
        rows.batch([index])
    with pytest.raises(IndexError):
        rows.valid_tokens([index])


def test_a_filler_row_has_no_target():
    rows = DocumentRows(_plain([[5, 6, 2]]), sequence_length=4, padding=EOS, packed=True)
    batch = rows.batch([-1, 0])
    assert batch["input_ids"][0].tolist() == [EOS] * 4
    assert batch["targets"][0].tolist() == [IGNORED] * 4
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3]
    assert rows.valid_tokens([-1]) == 0


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), capacity=st.integers(30, 60))
def test_best_fit_places_each_item_once_in_few_rows(lengths, capacity):
    order, ends = best_fit(np.array(lengths), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    loads = [int(np.array(lengths)[row].sum()) for row in np.split(order, ends[:-1])]
    assert max(loads) <= capacity
    assert len(loads) <= 11 / 9 * -(-sum(lengths) // capacity) + 4 or sorted(loads)[0] + sorted(loads)[1] > capacity


def test_packing_and_padding_have_the_same_targets(section, write_text):
    texts = [f"document {number} " * (1 + number % 3) for number in range(12)]
    files = write_text(*texts)
    targets = []
    for packing in (True, False):
        data = prepare_data(section(files, packing=packing, sequence_length=64, evaluation_fraction=0.0))
        batch = data.train.batch(range(len(data.train)))
        targets.append(sorted(batch["targets"][batch["targets"] != IGNORED].tolist()))
    assert targets[0] == targets[1]
    assert len(data.train) == len(texts)


def test_padding_is_the_pad_token_where_there_is_one(section, write_text, tmp_path):
    tokenizer = build_tokenizer()
    for pad, expected in ((None, tokenizer.eos_token_id), ("<|bos|>", tokenizer.bos_token_id)):
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        recipe = section(
            write_text("two plus two"), packing=False, tokenizer=str(tmp_path / "tokenizer"), evaluation_fraction=0.0
        )
        assert prepare_data(recipe).train.batch([0])["input_ids"][0, -1] == expected


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.3)).eval()


def _nll(model, batches) -> tuple[float, int]:
    total, tokens = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        targets = batch["targets"].flatten()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets, reduction="sum").item()
        tokens += int((targets != IGNORED).sum())
    return total, tokens


def test_perplexity_is_the_same_for_every_batch_size_padding_side_packing_and_number_of_ranks(model):
    """https://github.com/huggingface/transformers/issues/37766"""
    generator = np.random.default_rng(0)
    documents = [[*generator.integers(3, 64, size=size).tolist(), EOS] for size in generator.integers(1, 20, size=13)]
    padded = DocumentRows(_plain(documents), sequence_length=24, padding=EOS, packed=False)
    packed = DocumentRows(_plain(documents), sequence_length=24, padding=EOS, packed=True)
    results = []
    for rows in (padded, packed):
        for micro_batch, world_size in ((1, 1), (4, 1), (5, 2), (2, 3)):
            ranks = [
                micro.tensors
                for rank in range(world_size)
                for micro in evaluation_batches(rows, micro_batch=micro_batch, rank=rank, world_size=world_size)
            ]
            results.append(_nll(model, ranks))
    for side in ("left", "right"):
        longest = max(map(len, documents))
        batch = [_padded(document, longest, side) for document in documents]
        results.append(_nll(model, [shifted({key: torch.tensor([row[key] for row in batch]) for key in batch[0]})]))
    assert {tokens for _, tokens in results} == {sum(len(document) - 1 for document in documents)}
    assert [total for total, _ in results] == pytest.approx([results[0][0]] * len(results), rel=1e-5)


def _padded(document: list[int], length: int, side: str) -> dict[str, list[int]]:
    """As a user's collator makes it: the pad token is the eos token, the mask says what is padding."""
    padding, real = [EOS] * (length - len(document)), [1] * len(document)
    if side == "left":
        ids, mask = padding + document, [0] * len(padding) + real
    else:
        ids, mask = document + padding, real + [0] * len(padding)
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}
