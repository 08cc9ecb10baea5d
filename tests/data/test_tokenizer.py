import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardlab.data.corpus import check_corpus, files_corpus
from shardlab.data.tokenizer import _sample, make_tokenizer, refuse_other_tokens
from shardlab.errors import UserError

HARD_TEXT = "Ünïcode 🎉\r\n\ttab  two spaces , don't . \u2028\x00<|endoftext|>\n\n"
SOURCE = "def total(values):\n    return sum(value for value in values)\n\n\n" * 40
EVERY_CHARACTER = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module", params=["bytes", "bpe-1k"])
def tokenizer(request, tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "source.txt").write_text(SOURCE + HARD_TEXT.replace("\0", ""))
    corpus = check_corpus(files_corpus([str(folder / "source.txt")]), folder / "cache")
    return make_tokenizer(request.param, corpus, folder / "cache")


@given(text=EVERY_CHARACTER)
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_beside_a_model_it_loads_with_autotokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(HARD_TEXT) == tokenizer.encode(HARD_TEXT)
    assert loaded.decode(loaded.encode(HARD_TEXT)) == HARD_TEXT
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == (
        "<|endoftext|>",
        tokenizer.eos_token_id,
        len(tokenizer),
    )


def test_a_byte_token_is_the_byte(tmp_path, write_text, checked):
    tokenizer = make_tokenizer("bytes", checked(write_text("x")), tmp_path)
    assert tokenizer.encode(HARD_TEXT.replace("<|endoftext|>", "")) == list(
        HARD_TEXT.replace("<|endoftext|>", "").encode()
    )
    assert len(tokenizer) == 257


def test_bpe_has_the_size_in_its_name_and_is_the_same_each_time(tmp_path, write_text, checked):
    words = " ".join(f"word{number} {number * 7919}" for number in range(3000))
    corpus = checked(write_text(words))
    first = make_tokenizer("bpe-1k", corpus, tmp_path / "one")
    second = make_tokenizer("bpe-1k", corpus, tmp_path / "two")
    assert len(first) == 1024
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_the_training_sample_is_spread_over_all_documents(write_text, checked):
    corpus = checked(write_text(*[str(number) * 10_000 for number in range(10)]))
    sample = list(_sample(corpus, 50_000))
    assert {piece[0] for piece in sample} == set("0123456789")
    assert sum(map(len, sample)) == pytest.approx(50_000, rel=0.1)


def test_a_hugging_face_directory_is_used_as_it_is(tokenizer, tmp_path, write_text, checked):
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = make_tokenizer(str(tmp_path / "saved"), checked(write_text("x")), tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_directory_without_a_tokenizer_is_refused(tmp_path, write_text, checked):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer in"):
        make_tokenizer(str(tmp_path), checked(write_text("x")), tmp_path)


def test_a_tokenizer_without_an_eos_token_is_refused(tmp_path, write_text, checked):
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no eos token"):
        make_tokenizer(str(tmp_path / "bare"), checked(write_text("x")), tmp_path)


def test_an_unknown_name_says_what_is_known(tmp_path, write_text, checked):
    with pytest.raises(UserError, match=r"'gpt2-tok' is neither 'bytes', 'bpe-<N>k'"):
        make_tokenizer("gpt2-tok", checked(write_text("x")), tmp_path)


def pairs_of(merges, eos="<end>"):
    vocabulary = {token: number for number, token in enumerate(("a", "b", "c", "ab", "bc", "<end>", "<stop>"))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)), eos_token=eos)


def test_field_case_b57_one_vocabulary_with_other_merges_or_other_roles_is_told_apart():
    """https://github.com/arcee-ai/DistillKit/issues/7: a teacher reads other tokens, and training looks normal."""
    merges = [("a", "b"), ("b", "c")]
    one = pairs_of(merges)
    refuse_other_tokens(one, pairs_of(merges), "teacher", "student")
    with pytest.raises(UserError, match=r"of one vocabulary, they split .* otherwise in teacher and in student"):
        refuse_other_tokens(one, pairs_of(merges[::-1]), "teacher", "student")
    with pytest.raises(UserError, match="eos is 5 in teacher and 6 in student"):
        refuse_other_tokens(one, pairs_of(merges, "<stop>"), "teacher", "student")
