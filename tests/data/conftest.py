"""Small corpora, and a section with the fields that `prepare_data` reads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Section:
    """A recipe's data section, byte tokens and user files by default."""

    cache_dir: str | None
    files: tuple[str, ...] = ()
    source: str | None = None
    evaluation_files: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    sequence_length: int = 16
    evaluation_fraction: float = 0.1


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
def section(tmp_path: Path) -> Callable[..., Section]:
    def make(files: tuple[str, ...], **fields: object) -> Section:
        return Section(cache_dir=str(tmp_path / "cache"), files=files, **fields)  # type: ignore[arg-type]

    return make
