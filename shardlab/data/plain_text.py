"""A text file as one document, in pieces: it is never whole in memory."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardlab.data.forms import PIECE_CHARACTERS, word_end
from shardlab.data.records import BOM, Fault, Problem

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileText:
    """The text of a file. With `mend`, what is not UTF-8 reads as U+FFFD, and NULs and a BOM are left out."""

    path: Path
    characters: int
    mend: bool = False

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """The text, its line ends unchanged, in pieces of about `characters` that end where a word does."""
        rest = ""
        encoding, errors = ("utf-8-sig", "replace") if self.mend else ("utf-8", "strict")
        with self.path.open(encoding=encoding, errors=errors, newline="") as file:
            while block := file.read(characters):
                text = rest + (block.replace("\0", "") if self.mend else block)
                cut = word_end(text) if len(block) == characters else len(text)
                rest = text[cut:]
                if cut:
                    yield text[:cut]
        if rest:
            yield rest


@dataclass(frozen=True)
class Found:
    """What there is to say about a text file: the first fault, its line, and the text as it would be mended."""

    fault: Fault | None
    line: int
    characters: int
    blank: bool


def find_fault(path: Path, *, mend: bool) -> Found:
    """Read a file to its end, or without `mend` to its first fault."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    fault: Fault | None = None
    line, lines, offset, characters, blank = 1, 0, 0, 0, True
    with path.open("rb") as file:
        while True:
            block = file.read(_READ_BYTES)
            pending = decoder.getstate()[0]
            try:
                found = _unwanted(block, offset)
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                found = found or (
                    Fault(Problem.NOT_UTF8, f"{error.reason} at byte {offset - len(pending) + error.start}"),
                    block[: max(error.start - len(pending), 0)].count(b"\n"),
                )
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                text = decoder.decode(pending + block, final=not block)
            if found is not None and fault is None:
                fault, line = found[0], lines + found[1] + 1
                if not mend:
                    return Found(fault, line, characters, blank=False)
            text = text.replace("\0", "").removeprefix(BOM if offset == 0 else "")
            characters += len(text)
            blank = blank and not text.strip()
            if not block:
                return Found(fault, line, characters, blank)
            lines += block.count(b"\n")
            offset += len(block)


def _unwanted(block: bytes, offset: int) -> tuple[Fault, int] | None:
    """A BOM or a NUL in the block at `offset`, and the line ends before it."""
    if offset == 0 and block.startswith(BOM.encode()):
        return Fault(Problem.BOM), 0
    position = block.find(b"\0")
    if position < 0:
        return None
    return Fault(Problem.NUL, f"byte {offset + position}"), block.count(b"\n", 0, position)
