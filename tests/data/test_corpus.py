from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.corpus import Document, files_corpus, stdlib_corpus
from shardlab.errors import UserError


def test_stdlib_has_the_library_and_not_its_tests():
    names = [document.name for document in stdlib_corpus().documents]
    assert "json/decoder.py" in names
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts[:-1])]


def test_a_glob_is_sorted_and_each_file_comes_once(write_text, tmp_path):
    first, second, _ = write_text("a", "b", "c")
    corpus = files_corpus([second, str(tmp_path / "text" / "*.txt"), first])
    assert [document.name for document in corpus.documents] == ["001.txt", "000.txt", "002.txt"]


def test_a_name_with_glob_characters_is_a_file(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    assert [document.path for document in files_corpus([str(path)]).documents] == [path]


def test_digest_follows_the_content_and_not_the_place(write_text):
    digest = files_corpus(write_text("one", "two")).digest
    assert files_corpus(write_text("one", "two", directory="elsewhere")).digest == digest
    assert files_corpus(write_text("one", "twa", directory="other")).digest != digest


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.txt does not exist"):
        files_corpus([str(tmp_path / "missing.txt")])


def test_a_glob_without_matches_is_named(tmp_path):
    with pytest.raises(UserError, match=r"\*\.md matches no file"):
        files_corpus([str(tmp_path / "*.md")])


def test_a_directory_is_refused_with_the_glob_to_use(tmp_path):
    with pytest.raises(UserError, match=r"is a directory; name its files, for example .*/\*\.txt"):
        files_corpus([str(tmp_path)])


@pytest.mark.parametrize(("content", "offset"), [(b"ok \xc9 ", 3), (b"x" * ((1 << 20) - 1) + b"\xc3(", (1 << 20) - 1)])
def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path, content, offset):
    """Also where the bad sequence straddles two reads.

    https://github.com/luyug/COIL/issues/7
    """
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"bad\.txt is not UTF-8 \(.* at byte {offset}\)"):
        files_corpus([str(path)])


def test_a_truncated_last_character_is_not_utf8(tmp_path):
    path = tmp_path / "cut.txt"
    path.write_bytes("né".encode()[:-1])
    with pytest.raises(UserError, match="at byte 1"):
        files_corpus([str(path)])


def test_empty_files_are_left_out_and_a_corpus_of_them_is_refused(write_text):
    assert len(files_corpus(write_text("", "text")).documents) == 1
    with pytest.raises(UserError, match="no text"):
        files_corpus(write_text("", "", directory="empty"))


@given(st.text(alphabet=st.sampled_from("ab \n\r\t\u2028é🎉"), min_size=1, max_size=60), st.integers(1, 20))
def test_pieces_are_the_text_unchanged(tmp_path_factory, text, characters):
    path = tmp_path_factory.mktemp("pieces") / "text.txt"
    path.write_bytes(text.encode())
    pieces = list(Document("text", path, len(text.encode()), "").pieces(characters))
    assert "".join(pieces) == text
    assert all(pieces)
