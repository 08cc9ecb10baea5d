"""From a recipe's data section to rows: corpus, tokenizer, tokens, split, packing."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from shardlab.data.cache import cache_root
from shardlab.data.chat import ChatTemplate
from shardlab.data.corpus import CheckedCorpus, Corpus, check_corpus, files_corpus, refusal, stdlib_corpus
from shardlab.data.document_rows import DocumentRows
from shardlab.data.forms import ChatForm, Form, InstructForm, TextForm
from shardlab.data.own_rows import OwnData, own_rows
from shardlab.data.packing import PackedRows
from shardlab.data.report import DataReport
from shardlab.data.sources import Reading
from shardlab.data.streaming import StreamedText, StreamLoader
from shardlab.data.teacher_cache import TaughtRows, TeacherCache
from shardlab.data.tokenizer import make_tokenizer, named_tokenizer, tokenizer_directory
from shardlab.data.tokens import TokenStream, corpus_fingerprint, tokenize_corpus
from shardlab.data.windows import WindowLoader
from shardlab.errors import UserError
from shardlab.recipe import DataSection

MadeRows = PackedRows | DocumentRows


@dataclass(frozen=True)
class PreparedData:
    """Train and evaluation rows. `documents` and the token counts are of the text, before packing.

    `fingerprint` identifies text, tokenizer and split: runs with the same one see the same tokens. It does not depend
    on where the files lie, nor on any seed. Of streamed text the number of tokens is not known: None. What
    `teacher` says of the training rows comes with their windows.
    """

    tokenizer: PreTrainedTokenizerFast
    train: MadeRows | StreamedText
    evaluation: MadeRows | None
    corpora: tuple[CheckedCorpus, ...]
    train_tokens: int | None
    evaluation_tokens: int
    fingerprint: str
    teacher: TeacherCache | None = None

    def size(self) -> str:
        """How much there is, for people."""
        return "a stream of tokens" if self.train_tokens is None else f"{self.train_tokens:,} tokens"

    @property
    def documents(self) -> int:
        """Documents of training and evaluation."""
        return self.report.documents

    @property
    def report(self) -> DataReport:
        """What was left out, mended and cut; of streamed text up to now."""
        return DataReport.of([corpus.report for corpus in self.corpora], [self.train, self.evaluation])

    def windows(
        self,
        *,
        global_batch_size: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        steps: int,
        start_step: int = 0,
    ) -> WindowLoader | StreamLoader:
        """This rank's windows of the training rows. Raises UserError for batch sizes that do not multiply."""
        layout = {"global_batch_size": global_batch_size, "micro_batch": micro_batch}
        share = {"rank": rank, "world_size": world_size, "seed": seed, "steps": steps, "start_step": start_step}
        if isinstance(self.train, StreamedText):
            return StreamLoader(self.train, **layout, **share)
        rows = self.train if self.teacher is None else TaughtRows(self.train, self.teacher)
        return WindowLoader(rows, **layout, **share)


def prepare_data(section: DataSection) -> PreparedData:
    """Read, tokenise (or map what the cache has), split and pack the text of a recipe's `data`.

    Every rank calls it; one process of a host does the work, the others wait. The vocabulary's size is
    `len(tokenizer)`.
    Raises UserError for unusable files or tokenizer, bad records where they are errors, a text too short to split, or
    a cache that cannot be written.
    """
    cache = cache_root(section.cache_dir)
    corpora = read_corpora(section, cache)
    for corpus in corpora:
        complaint = refusal(corpus)
        if section.on_bad_record == "error" and complaint is not None:
            raise UserError(complaint)
    train, *others = corpora
    tokenizer = make_tokenizer(section.tokenizer, train, cache)

    def rows(stream: TokenStream) -> MadeRows:
        return _rows(stream, section, tokenizer)

    held_out = tokenize_corpus(others[0], tokenizer, 0.0, cache) if others else None
    if section.streaming:
        fingerprint, train_tokens = corpus_fingerprint(train, tokenizer), None
        evaluation = held_out.train if held_out else None
        training: MadeRows | StreamedText = _streamed(train, section, tokenizer, rows)
    else:
        fraction = 0.0 if held_out else section.evaluation_fraction
        tokenized = tokenize_corpus(train, tokenizer, fraction, cache)
        fingerprint, train_tokens = tokenized.fingerprint, len(tokenized.train.tokens)
        evaluation = held_out.train if held_out else tokenized.evaluation
        training = rows(tokenized.train)
    if held_out:
        fingerprint = hashlib.sha256(f"{fingerprint} {held_out.fingerprint}".encode()).hexdigest()[:32]
    return PreparedData(
        tokenizer=tokenizer,
        train=training,
        evaluation=rows(evaluation) if evaluation is not None else None,
        corpora=corpora,
        train_tokens=train_tokens,
        evaluation_tokens=len(evaluation.tokens) if evaluation is not None else 0,
        fingerprint=fingerprint,
    )


def prepare(section: DataSection) -> PreparedData | OwnData:
    """`prepare_data`, or the rows of the user's own function where `section.builder` names one."""
    return prepare_data(section) if section.builder is None else own_rows(section.builder)


def read_corpora(section: DataSection, cache: Path) -> tuple[CheckedCorpus, ...]:
    """The training corpus, and the evaluation corpus if it has files of its own, their records looked at."""
    reading = Reading(_form(section), section.on_bad_record == "replace", section.max_record_bytes)
    corpora: list[Corpus] = [files_corpus(section.files, reading) if section.files else stdlib_corpus()]
    if section.evaluation_files:
        corpora.append(files_corpus(section.evaluation_files, reading, key="data.evaluation_files"))
    return tuple(check_corpus(corpus, cache) for corpus in corpora)


def _form(section: DataSection) -> Form:
    columns = section.columns
    if section.format == "instruct":
        return InstructForm(columns.prompt, columns.completion)
    if section.format == "chat":
        if named_tokenizer(section.tokenizer):
            raise UserError(
                f"data.format chat: the tokenizer {section.tokenizer} has no chat template; give data.tokenizer a "
                "directory whose tokenizer has one"
            )
        return ChatForm(columns.messages, ChatTemplate(tokenizer_directory(section.tokenizer)))
    return TextForm(columns.text)


def _rows(stream: TokenStream, section: DataSection, tokenizer: PreTrainedTokenizerFast) -> MadeRows:
    if section.packing and stream.learned is None:
        return PackedRows(stream, sequence_length=section.sequence_length, eos=tokenizer.eos_token_id)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = DocumentRows(stream, sequence_length=section.sequence_length, padding=padding, packed=section.packing)
    if not len(rows) and not section.streaming:
        raise UserError(
            f"data.sequence_length: none of the {rows.masked_documents} documents has a token to learn within "
            f"{section.sequence_length} tokens; raise it"
        )
    return rows


def _streamed(
    corpus: CheckedCorpus,
    section: DataSection,
    tokenizer: PreTrainedTokenizerFast,
    rows: Callable[[TokenStream], MadeRows],
) -> StreamedText:
    plain = section.format == "text"
    keep = section.sequence_length + 1 if plain and not section.packing else None
    return StreamedText(corpus, tokenizer, rows, keep=keep)
