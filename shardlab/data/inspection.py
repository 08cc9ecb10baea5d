"""What `shardlab data inspect` shows: samples as the model gets them, lengths, what packing saves, bad records."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from shardlab.data.corpus import refusal
from shardlab.data.document_rows import DocumentRows
from shardlab.data.order import rows_at
from shardlab.data.packing import PackedRows
from shardlab.data.prepare import MadeRows, PreparedData, prepare_data
from shardlab.data.records import SHOWN_PLACES
from shardlab.data.report import DataReport
from shardlab.data.streaming import StreamedText
from shardlab.data.tokens import TokenStream
from shardlab.data.window import IGNORED
from shardlab.errors import UserError
from shardlab.recipe import DataSection

BAR_CHARACTERS = 40
_SEED = 0


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of a row: of the document with this number in the row, and all learned or none of them."""

    text: str
    tokens: int
    document: int
    learned: bool
    padding: bool


@dataclass(frozen=True)
class Layout:
    """How the documents lie in rows. `padding` is the share of positions behind documents."""

    rows: int
    padding: float
    targets: int
    truncated_documents: int
    positions_per_target: float


@dataclass(frozen=True)
class Inspection:
    """`lengths`: (from, to, documents) in tokens. `streamed`: of the first chunk only. `refusal`: why training would
    stop, if it would."""

    report: DataReport
    refusal: str | None
    streamed: bool
    sequence_length: int
    packing: bool
    documents: int
    tokens: int
    evaluation_tokens: int
    lengths: list[tuple[int, int, int]]
    packed: Layout
    padded: Layout
    samples: list[list[Segment]]

    @property
    def saved(self) -> float:
        """Share of the positions to be computed per target that packing saves."""
        return 1 - self.packed.positions_per_target / self.padded.positions_per_target

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"saved_by_packing": self.saved}

    def text(self, mark: Callable[[str], str] = "⟦{}⟧".format) -> str:
        """For people; `mark` shows what is not learned."""
        of = " of the first chunk of the stream" if self.streamed else ""
        lines = [f"{self.documents:,} documents, {self.tokens:,} tokens{of}; {self.evaluation_tokens:,} held out", ""]
        lines += self.report.lines(SHOWN_PLACES)
        lines += ["", f"tokens per document (sequence_length {self.sequence_length})", *self._histogram(), ""]
        lines += [f"{'':9}{'rows':>12}{'padding':>10}{'targets':>14}{'cut documents':>15}"]
        for name, layout in (("packed", self.packed), ("padded", self.padded)):
            lines.append(
                f"{name:<9}{layout.rows:>12,}{layout.padding:>10.1%}{layout.targets:>14,}{layout.truncated_documents:>15,}"
            )
        lines.append(f"packing saves {self.saved:.1%} of the positions to compute per target")
        for number, segments in enumerate(self.samples, start=1):
            packing = "packed" if self.packing else "padded"
            lines += ["", f"── row {number} ({packing}; {mark('not learned')}) ──", _drawn(segments, mark)]
        return "\n".join(lines)

    def _histogram(self) -> Iterator[str]:
        most = max(count for _, _, count in self.lengths)
        for first, last, count in self.lengths:
            bar = "█" * max(round(count / most * BAR_CHARACTERS), count > 0)
            yield f"{first:>9,} to {last:<9,} {count:>9,}  {bar}".rstrip()


def inspect_data(section: DataSection, rows: int = 3) -> Inspection:
    """Prepare the data as training would, but for bad records, which are left out where they are errors.

    Raises UserError for whatever else keeps it from being trained on.
    """
    if section.builder is not None:
        raise UserError("data.builder brings rows of its own: there are no documents to show")
    tolerant = section.on_bad_record == "error"
    data = prepare_data(section.model_copy(update={"on_bad_record": "skip"}) if tolerant else section)
    complaints = [complaint for corpus in data.corpora if (complaint := refusal(corpus)) is not None]
    made = _made(data)
    stream = made.stream
    padding = data.tokenizer.eos_token_id
    padded = DocumentRows(stream, sequence_length=section.sequence_length, padding=padding, packed=False)
    packed = made if section.packing else _packed(stream, section.sequence_length, padding)
    return Inspection(
        report=data.report,
        refusal=complaints[0] if tolerant and complaints else None,
        streamed=section.streaming,
        sequence_length=section.sequence_length,
        packing=section.packing,
        documents=len(stream.ends),
        tokens=len(stream.tokens),
        evaluation_tokens=data.evaluation_tokens,
        lengths=_lengths(stream),
        packed=_layout(packed),
        padded=_layout(padded),
        samples=[_segments(made, row, data.tokenizer) for row in _chosen(len(made), rows)],
    )


def _made(data: PreparedData) -> MadeRows:
    if not isinstance(data.train, StreamedText):
        return data.train
    for made in data.train.chunks(0, _SEED):
        return made
    raise UserError("data.sequence_length: no document has a token to learn; raise it")


def _packed(stream: TokenStream, sequence_length: int, padding: int) -> MadeRows:
    if stream.learned is None:
        return PackedRows(stream, sequence_length=sequence_length, eos=padding)
    return DocumentRows(stream, sequence_length=sequence_length, padding=padding, packed=True)


def _layout(rows: MadeRows) -> Layout:
    targets = rows.valid_tokens(np.arange(len(rows)))
    positions = len(rows) * rows.sequence_length
    used = rows.used_positions
    truncated = rows.truncated_documents if isinstance(rows, DocumentRows) else 0
    return Layout(len(rows), 1 - used / positions, targets, truncated, positions / targets)


def _lengths(stream: TokenStream) -> list[tuple[int, int, int]]:
    """Documents by length, between powers of two, from the shortest to the longest there is."""
    exponents = np.floor(np.log2(np.maximum(stream.lengths, 1))).astype(np.int64)
    counts = np.bincount(exponents)
    return [(1 << e, (2 << e) - 1, int(counts[e])) for e in range(int(exponents.min()), len(counts))]


def _chosen(length: int, rows: int) -> list[int]:
    """The rows that training with seed 0 takes first."""
    return rows_at(np.arange(min(rows, length), dtype=np.int64), length, _SEED).tolist()


def _segments(rows: MadeRows, row: int, tokenizer: Any) -> list[Segment]:
    """A row's tokens, grouped. What has no target and ends the row is padding: no document of a row has none."""
    batch = {key: values[0].numpy() for key, values in rows.batch([row]).items()}
    documents = np.cumsum(batch["position_ids"] == 0) - 1
    learned = np.concatenate(([False], batch["targets"][:-1] != IGNORED))  # a target stands at the position before it
    last = documents[-1]
    empty = not (batch["targets"][documents == last] != IGNORED).any()
    segments = []
    keys = zip(documents.tolist(), learned.tolist(), strict=True)
    for (document, is_learned), run in groupby(enumerate(keys), key=lambda item: item[1]):
        positions = [position for position, _ in run]
        text = tokenizer.decode(batch["input_ids"][positions].tolist(), skip_special_tokens=False)
        padding = bool(empty and document == last and document > 0)
        segments.append(Segment(text, len(positions), document, is_learned, padding))
    return segments


def _drawn(segments: list[Segment], mark: Callable[[str], str]) -> str:
    parts = []
    for document, group in groupby(segments, key=lambda segment: segment.document):
        members = list(group)
        if members[0].padding:
            parts.append(f"── padding: {sum(segment.tokens for segment in members)} tokens ──")
            continue
        text = "".join(segment.text if segment.learned else mark(segment.text) for segment in members)
        parts.append(f"── document {document + 1} ──\n{text}")
    return "\n".join(parts)
