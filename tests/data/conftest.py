"""Small corpora, and recipes' data sections about them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.data.corpus import CheckedCorpus, check_corpus, files_corpus
from shardlab.recipe import DataSection

WriteText = Callable[..., tuple[str, ...]]


@pytest.fixture
def write_text(tmp_path: Path) -> WriteText:
    """Write texts to numbered files and return their paths."""

    def write(*texts: str, directory: str = "text") -> tuple[str, ...]:
        folder = tmp_path / directory
        folder.mkdir(exist_ok=True)
        paths = []
        for number, text in enumerate(texts):
            path = folder / f"{number:03d}.txt"
            path.write_bytes(text.encode())
            paths.append(str(path))
        return tuple(paths)

    return write


@pytest.fixture
def section(tmp_path: Path) -> Callable[..., DataSection]:
    """A data section of these files: byte tokens, rows of 16."""

    def make(files: tuple[str, ...], **fields: object) -> DataSection:
        defaults = {"tokenizer": "bytes", "sequence_length": 16, "evaluation_fraction": 0.1}
        return DataSection(cache_dir=str(tmp_path / "cache"), files=files, **{**defaults, **fields})

    return make


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., CheckedCorpus]:
    """The corpus in these files, its records looked at."""

    def make(files: tuple[str, ...]) -> CheckedCorpus:
        return check_corpus(files_corpus(files), tmp_path / "cache")

    return make
