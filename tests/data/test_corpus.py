from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.corpus import check_corpus, files_corpus, refusal, stdlib_corpus
from shardlab.data.forms import Text
from shardlab.data.plain_text import FileText
from shardlab.errors import UserError


def test_stdlib_has_the_library_and_not_its_tests():
    names = [source.name for source in stdlib_corpus().sources]
    assert "json/decoder.py" in names
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts[:-1])]


def test_a_glob_is_sorted_and_each_file_comes_once(write_text, tmp_path):
    first, second, _ = write_text("a", "b", "c")
    corpus = files_corpus([second, str(tmp_path / "text" / "*.txt"), first])
    assert [source.name for source in corpus.sources] == ["001.txt", "000.txt", "002.txt"]


def test_a_name_with_glob_characters_is_a_file(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    assert [source.path for source in files_corpus([str(path)]).sources] == [path]


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
    with pytest.raises(UserError, match=r"is a directory and no saved dataset; name its files, for example .*/\*\.txt"):
        files_corpus([str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "line", "offset"),
    [
        (b"ok \xc9 ", 1, 3),
        (b"ok\n\n \xc9", 3, 5),
        (b"\n" + b"x" * ((1 << 20) - 2) + b"\xc3(", 2, (1 << 20) - 1),
        ("né".encode()[:-1], 1, 1),
    ],
)
def test_a_file_that_is_not_utf8_is_named_with_line_and_byte(checked, tmp_path, content, line, offset):
    """Also where the bad sequence straddles two reads, or the file ends in it.

    https://github.com/luyug/COIL/issues/7
    """
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    complaint = refusal(checked((str(path), str(tmp_path / "good.txt"))))
    assert f"1 of 2 records are bad: 1 not UTF-8 ({path}:{line} " in complaint
    assert f" at byte {offset})" in complaint


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"a\nb\0c", "1 NUL ({path}:2 byte 3)"), ("\ufefftext".encode(), "1 BOM ({path}:1)")],
)
def test_a_nul_or_a_bom_in_a_text_file_is_named(checked, tmp_path, content, problem):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    assert problem.format(path=path) in refusal(checked((str(path), str(tmp_path / "good.txt"))))


def test_empty_files_are_left_out_and_counted_and_a_corpus_of_them_is_refused(checked, write_text):
    """Each package of a source tree has an empty file: that is no fault of the corpus."""
    corpus = checked(write_text("", "text", " \n\t"))
    assert [list(sample.pieces()) for sample in corpus.samples()] == [["text"]]
    assert corpus.report.problems == {"empty file": 2}
    assert refusal(corpus) is None
    with pytest.raises(UserError, match=r"no text in .*2 empty file"):
        checked(write_text("", "", directory="empty"))


def test_mended_text_has_no_bom_no_nul_and_marks_for_bad_bytes(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes("\ufeffa\0b".encode() + b"\xc9 c")
    assert "".join(FileText(path, 0, mend=True).pieces(2)) == "ab\ufffd c"


def test_what_the_look_found_is_kept(write_text, tmp_path, monkeypatch):
    corpus = files_corpus(write_text("text", ""))
    first = check_corpus(corpus, tmp_path / "cache").report
    monkeypatch.setattr(type(corpus), "look", lambda corpus: pytest.fail("looked again"))
    assert check_corpus(corpus, tmp_path / "cache").report == first


TEXTS = st.text(alphabet=st.sampled_from("ab \n\r\t\u2028é🎉"), min_size=1, max_size=60)


@given(TEXTS, st.integers(1, 20))
def test_pieces_are_the_text_unchanged(tmp_path_factory, text, characters):
    path = tmp_path_factory.mktemp("pieces") / "text.txt"
    path.write_bytes(text.encode())
    for sample in (FileText(path, len(text)), Text(text)):
        pieces = list(sample.pieces(characters))
        assert "".join(pieces) == text
        assert all(pieces)
