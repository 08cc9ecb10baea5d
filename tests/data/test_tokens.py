import os
import subprocess
import sys
from functools import partialmethod

import datasets
import numpy as np
import pytest

from shardlab.data import encode as encode_module
from shardlab.data.plain_text import FileText
from shardlab.data.tokenizer import make_tokenizer
from shardlab.data.tokens import read_stream, tokenize_corpus
from tests.data.chat_tokenizer import build_tokenizer


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(cache, write_text, checked):
    return make_tokenizer("bytes", checked(write_text("x", directory="other")), cache)


def _documents(stream) -> list[bytes]:
    """Texts back from byte tokens, each without the eos that must end it."""
    starts = np.concatenate(([0], stream.ends[:-1]))
    documents = [stream.tokens[start:end].tolist() for start, end in zip(starts, stream.ends, strict=True)]
    assert all(document[-1] == 256 for document in documents)
    return [bytes(document[:-1]) for document in documents]


def test_each_document_is_its_text_and_an_eos(cache, tokenizer, write_text, checked):
    texts = ["one", "zwei <|endoftext|> ü\r\n", "3"]
    tokenized = tokenize_corpus(checked(write_text(*texts)), tokenizer, 0.0, cache)
    assert _documents(tokenized.train) == [text.encode() for text in texts]
    assert tokenized.evaluation is None


def test_split_documents_are_the_corpus(cache, tokenizer, write_text, checked):
    texts = [f"document {number}" for number in range(40)]
    tokenized = tokenize_corpus(checked(write_text(*texts)), tokenizer, 0.2, cache)
    train, held = _documents(tokenized.train), _documents(tokenized.evaluation)
    assert sorted(train + held) == sorted(text.encode() for text in texts)
    assert (train, held) == (
        sorted(train, key=lambda text: int(text[9:])),
        sorted(held, key=lambda text: int(text[9:])),
    )
    assert len(held) == pytest.approx(8, abs=1)


def test_text_encoded_in_pieces_has_the_whole_texts_tokens(cache, write_text, checked, monkeypatch):
    text = "def f(value):\n\n    return 'word'  # it's so\n" * 50
    corpus = checked(write_text(text))
    bpe = make_tokenizer("bpe-1k", corpus, cache)
    monkeypatch.setattr(encode_module, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(FileText, "pieces", partialmethod(FileText.pieces, 37))
    tokenized = tokenize_corpus(corpus, bpe, 0.0, cache)
    assert tokenized.train.tokens.tolist() == [*bpe.encode(text), bpe.eos_token_id]


@pytest.mark.parametrize("bos", [False, True])
def test_a_document_begins_as_the_tokenizer_begins_a_text(cache, write_text, checked, monkeypatch, bos):
    text = "What is two plus two? It is four. " * 20
    tokenizer = build_tokenizer(bos=bos)
    monkeypatch.setattr(FileText, "pieces", partialmethod(FileText.pieces, 37))
    tokenized = tokenize_corpus(checked(write_text(text)), tokenizer, 0.0, cache)
    assert tokenized.train.tokens.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert (tokenized.train.tokens[0] == tokenizer.bos_token_id) == bos


def test_the_file_is_a_dataset(cache, tokenizer, write_text, checked):
    tokenized = tokenize_corpus(checked(write_text("one", "two")), tokenizer, 0.0, cache)
    dataset = datasets.Dataset.from_file(str(cache / "tokens" / tokenized.fingerprint / "train.arrow"))
    assert dataset["input_ids"][:] == [[*b"one", 256], [*b"two", 256]]


def test_reading_copies_nothing(cache, tokenizer, write_text, checked):
    tokenized = tokenize_corpus(checked(write_text("text" * 100)), tokenizer, 0.0, cache)
    stream = read_stream(cache / "tokens" / tokenized.fingerprint / "train.arrow")
    assert not stream.tokens.flags.owndata
    assert not stream.tokens.flags.writeable
    assert (stream.tokens.dtype, stream.ends.dtype) == (np.uint16, np.int64)


def test_a_large_vocabulary_takes_four_bytes(cache, tokenizer, write_text, checked):
    tokenizer.add_tokens([f"<extra{number}>" for number in range(1 << 16)])
    tokenized = tokenize_corpus(checked(write_text("a<extra65535>")), tokenizer, 0.0, cache)
    assert tokenized.train.tokens.dtype == np.uint32
    assert tokenized.train.tokens.tolist() == [ord("a"), 257 + 65535, 256]


def test_a_tokenizer_saved_with_truncation_does_not_cut_documents(cache, tokenizer, write_text, checked):
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenized = tokenize_corpus(checked(write_text("a longer text")), tokenizer, 0.0, cache)
    assert _documents(tokenized.train) == [b"a longer text"]


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_file_is_made_again(cache, tokenizer, write_text, checked, damage):
    corpus = checked(write_text("text" * 100))
    tokenized = tokenize_corpus(corpus, tokenizer, 0.0, cache)
    file = cache / "tokens" / tokenized.fingerprint / "train.arrow"
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    file.unlink()  # not in place: this process maps it
    file.write_bytes(content)
    again = tokenize_corpus(corpus, tokenizer, 0.0, cache)
    assert np.array_equal(again.train.tokens, tokenized.train.tokens)
    assert file.read_bytes() != content


def test_fingerprint_follows_text_tokenizer_and_split(cache, tokenizer, write_text, checked):
    corpus = checked(write_text("some text", "more text"))
    fingerprints = [
        tokenize_corpus(corpus, tokenizer, 0.0, cache).fingerprint,
        tokenize_corpus(corpus, tokenizer, 0.5, cache).fingerprint,
        tokenize_corpus(corpus, make_tokenizer("bpe-1k", corpus, cache), 0.0, cache).fingerprint,
        tokenize_corpus(checked(write_text("some", directory="b")), tokenizer, 0.0, cache).fingerprint,
    ]
    assert len(set(fingerprints)) == 4
    same = checked(write_text("some text", "more text", directory="moved"))
    assert tokenize_corpus(same, tokenizer, 0.0, cache).fingerprint == fingerprints[0]


ENCODE = """
import sys, psutil
from pathlib import Path
from shardlab.data.corpus import check_corpus, files_corpus
from shardlab.data.tokenizer import make_tokenizer
from shardlab.data.tokens import tokenize_corpus
corpus = check_corpus(files_corpus([sys.argv[1]]), Path(sys.argv[2]))
before = psutil.Process().num_threads()
tokenize_corpus(corpus, make_tokenizer("bytes", corpus, Path(sys.argv[2])), 0.0, Path(sys.argv[2]))
print(psutil.Process().num_threads() - before)
"""


@pytest.mark.slow
def test_encoding_takes_every_core_in_a_ranks_environment(cache, tmp_path):
    """Ranks are started with the tokenizer's threads off: they would be in each other's way while training."""
    (tmp_path / "records.jsonl").write_text('{"text": "some text"}\n' * 1000)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ENCODE, str(tmp_path / "records.jsonl"), str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= len(os.sched_getaffinity(0))
