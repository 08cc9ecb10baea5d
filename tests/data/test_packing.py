import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from shardlab.data.packing import PackedRows, pack
from shardlab.data.tokens import TokenStream
from shardlab.data.window import IGNORED

EOS = 63
DOCUMENTS = st.lists(st.lists(st.integers(0, 62), min_size=1, max_size=12), min_size=1, max_size=12)


def _rows(documents: list[list[int]], sequence_length: int) -> PackedRows:
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    ends = np.cumsum([len(document) for document in documents])
    return PackedRows(TokenStream(tokens, ends), sequence_length=sequence_length, eos=EOS)


def _naive(documents: list[list[int]], sequence_length: int) -> list[dict[str, list[int]]]:
    """Token by token, from the definition."""
    inputs, targets, starts = [], [], []
    for document in documents:
        starts += [len(inputs)] * len(document)
        targets += [*document[1:], IGNORED]
        inputs += document
    filled = max(1, -(-(len(inputs) - 1) // sequence_length)) * sequence_length
    starts += [len(inputs)] * (filled - len(inputs))
    targets += [IGNORED] * (filled - len(inputs))
    inputs += [EOS] * (filled - len(inputs))
    return [
        {
            "input_ids": inputs[first : first + sequence_length],
            "targets": targets[first : first + sequence_length],
            "position_ids": [at - max(starts[at], first) for at in range(first, first + sequence_length)],
        }
        for first in range(0, filled, sequence_length)
    ]


@given(documents=DOCUMENTS, sequence_length=st.integers(1, 20))
def test_rows_are_those_of_the_definition(documents, sequence_length):
    rows = _rows(documents, sequence_length)
    batch = rows.batch(range(len(rows)))
    expected = _naive(documents, sequence_length)
    for key, values in batch.items():
        assert values.dtype == torch.int64
        assert values.tolist() == [row[key] for row in expected]


@given(documents=DOCUMENTS, sequence_length=st.integers(1, 20), data=st.data())
def test_valid_tokens_are_the_targets_that_count(documents, sequence_length, data):
    rows = _rows(documents, sequence_length)
    indices = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=8))
    assert rows.valid_tokens(indices) == int((rows.batch(indices)["targets"] != IGNORED).sum())


@given(documents=DOCUMENTS, sequence_length=st.integers(1, 20))
def test_each_token_but_a_documents_first_is_a_target_once(documents, sequence_length):
    targets = pack(documents, sequence_length, EOS)["targets"]
    expected = [token for document in documents for token in document[1:]]
    assert targets[targets != IGNORED].tolist() == expected


def test_the_end_of_a_document_is_a_target_and_the_next_one_is_not():
    batch = pack([[1, 2, EOS], [4, 5, EOS]], 5, EOS)
    assert batch["input_ids"].tolist() == [[1, 2, EOS, 4, 5]]
    assert batch["targets"].tolist() == [[2, EOS, IGNORED, 5, EOS]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def test_a_corpus_shorter_than_a_row_is_one_filled_row():
    batch = pack([[1, 2]], 5, EOS)
    assert batch["input_ids"].tolist() == [[1, 2, EOS, EOS, EOS]]
    assert batch["targets"].tolist() == [[2, IGNORED, IGNORED, IGNORED, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_a_filler_row_has_no_target():
    rows = _rows([[1, 2, 3]], 4)
    batch = rows.batch([-1, 0])
    assert batch["input_ids"].tolist() == [[EOS] * 4, [1, 2, 3, EOS]]
    assert batch["targets"][0].tolist() == [IGNORED] * 4
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3]
    assert rows.valid_tokens([-1]) == 0


@pytest.mark.parametrize("index", [-2, 1])
def test_a_row_that_does_not_exist_is_refused(index):
    with pytest.raises(IndexError):
        _rows([[1, 2, 3]], 4).batch([index])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,  # so that a leak would be far above rounding
            attn_implementation="sdpa",
        )
    ).eval()


def _logits(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


def _nll(model, batch) -> float:
    logits = _logits(model, batch).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum").item()


A, B = [1, 2, 3], [4, 5, 6, 7, 8]


@pytest.mark.parametrize("sequence_length", [8, 12])
def test_packed_documents_cost_what_they_cost_alone(model, sequence_length):
    """Exactly filled, and with filler behind.

    https://github.com/huggingface/trl/issues/805
    """
    alone = _nll(model, pack([A], len(A), EOS)) + _nll(model, pack([B], len(B), EOS))
    assert _nll(model, pack([A, B], sequence_length, EOS)) == pytest.approx(alone, abs=1e-5)


def test_one_document_does_not_change_the_nexts_logits(model):
    """https://github.com/huggingface/trl/issues/1230"""
    other = torch.randint(0, 63, (3,), generator=torch.Generator().manual_seed(1)).tolist()
    assert other != A
    logits = [_logits(model, pack([first, B], 8, EOS))[0, 3:] for first in (A, other)]
    assert torch.equal(logits[0], logits[1])
    assert pack([A, B], 8, EOS)["targets"][0, 2] == IGNORED


def test_rows_of_one_batch_cost_what_they_cost_alone(model):
    """One row is a single document, the other is packed."""
    rows = _rows([list(range(20)), A, B], 8)
    together = _nll(model, rows.batch(range(len(rows))))
    alone = sum(_nll(model, rows.batch([index])) for index in range(len(rows)))
    assert together == pytest.approx(alone, abs=1e-4)
