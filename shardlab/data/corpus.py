"""Documents of a source, in an order that never changes, read in pieces so that the text is never whole in memory.

A document is one text file. All files are read once at the start, to hash them and to find those that are not UTF-8
before any work is done: a bad file should not end a run hours in.
"""

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlab.errors import UserError

PIECE_CHARACTERS = 1 << 18  # of a document's text held at once; the encoder needs some 130 bytes per token beside it
_READ_BYTES = 1 << 20
_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One UTF-8 text file. `name` is the same wherever the corpus lies; `digest` is the SHA-256 of its `size` bytes."""

    name: str
    path: Path
    size: int
    digest: str

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """The text, unchanged (line ends too), in pieces of about `characters`, cut where a word ends.

        A cut lies between a non-space and a space or newline: there the byte-level pre-tokenizer cuts anyway, so that
        the pieces' tokens are the whole text's. (A tokenizer of another kind may differ by a token at a cut.)
        """
        rest = ""
        with self.path.open(encoding="utf-8", newline="") as file:
            while block := file.read(characters):
                text = rest + block
                cut = _last_word_end(text) if len(block) == characters else len(text)
                rest = text[cut:]
                yield text[:cut]
        if rest:
            yield rest


@dataclass(frozen=True)
class Corpus:
    """The documents of a source, in order. `digest` covers names, contents and order, not where the files lie."""

    documents: tuple[Document, ...]

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.name}\0{document.digest}\n".encode())
        return digest.hexdigest()

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(document.size for document in self.documents)


def stdlib_corpus() -> Corpus:
    """The source of the running Python's standard library without its tests: 12 MB of text that is always there."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(_source_files(root)):
        try:
            documents.append(_scan(path, path.relative_to(root).as_posix()))
        except UnicodeDecodeError:
            continue  # a few files of the library are there to be in another encoding
    return _nonempty(documents, f"data.source 'stdlib': no source files under {root}")


def files_corpus(patterns: Sequence[str], *, key: str = "data.files") -> Corpus:
    """The text files that the paths and globs of the recipe's `key` name; a glob's matches sorted, each file once.

    Raises UserError if a pattern matches nothing or a directory, a file is not UTF-8, or there is no text at all.
    """
    documents = []
    for path in _matching(patterns, key):
        try:
            documents.append(_scan(path, path.name))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{key}: {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it, for example with iconv"
            ) from error
        except OSError as error:
            raise UserError(f"{key}: cannot read {path}: {error.strerror}") from error
    return _nonempty(documents, f"{key}: no text in {', '.join(patterns) or 'an empty list of files'}")


def _source_files(root: Path) -> Iterator[Path]:
    """Python files below `root`, without descending where there may be a hundred thousand others (site-packages)."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def _matching(patterns: Sequence[str], key: str) -> list[Path]:
    """Files in the patterns' order; the resolved path decides what is the same file."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        given = Path(pattern).expanduser()
        if given.is_dir():
            raise UserError(f"{key}: {pattern} is a directory; name its files, for example {pattern.rstrip('/')}/*.txt")
        matches = [given] if given.is_file() else [Path(name) for name in glob.glob(str(given), recursive=True)]
        files = sorted(path for path in matches if path.is_file())
        if not files:
            what = "matches no file" if glob.has_magic(pattern) else "does not exist"
            raise UserError(f"{key}: {pattern} {what} (looked from {Path.cwd()})")
        for path in files:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _scan(path: Path, name: str) -> Document:
    """Hash a file and check its encoding, a block at a time. Raises UnicodeDecodeError with the offset in the file."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    with path.open("rb") as file:
        while True:
            block = file.read(_READ_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                start = size - pending + error.start
                raise UnicodeDecodeError("utf-8", b"", start, start + 1, error.reason) from error
            if not block:
                return Document(name, path, size, digest.hexdigest())
            digest.update(block)
            size += len(block)


def _nonempty(documents: list[Document], message: str) -> Corpus:
    """Drop empty files (an end-of-text token alone teaches nothing); refuse a corpus without text."""
    kept = tuple(document for document in documents if document.size)
    if not kept:
        raise UserError(message)
    return Corpus(kept)


def _last_word_end(text: str) -> int:
    for position in range(len(text) - 1, 0, -1):
        if text[position] in " \n" and not text[position - 1].isspace():
            return position
    return len(text)
