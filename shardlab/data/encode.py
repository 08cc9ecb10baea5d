"""Samples as token ids, a batch of them at a time over all cores, and which of the ids are learned.

A document begins with what the tokenizer itself puts before a text (a BOS, for most that have one) and ends in its eos
token. In plain text that is all: text that spells a special token is text. Prompts and conversations are encoded as
`transformers` does, special tokens included, since templates are made of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shardlab.data.forms import ChatForm, Conversation, Form, InstructForm, Instruction, Sample
from shardlab.data.tokenizer import all_cores

BATCH_CHARACTERS = 1 << 20  # encoded at once: some 130 bytes of the encoder's memory per token
Item = TypeVar("Item")


@dataclass(frozen=True)
class Encoded:
    """Tokens of a document, or of a piece of one. `learned` marks those that are; None: all are."""

    ids: list[int]
    learned: NDArray[np.bool_] | None
    last: bool


Encoder = Callable[[Iterable[Any]], Iterator[Encoded]]


def make_encoder(form: Form, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """samples of `form` -> their tokens, in order."""
    if isinstance(form, InstructForm):
        return _InstructEncoder(tokenizer)
    if isinstance(form, ChatForm):
        return _ChatEncoder(tokenizer)
    return _TextEncoder(tokenizer)


def masks(form: Form) -> bool:
    """Whether documents of `form` have tokens that are not learned."""
    return isinstance(form, InstructForm | ChatForm)


class _TextEncoder:
    """Long documents go through in pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._encoder = _encoder(tokenizer)
        self._before = _opening(self._encoder)
        self._encoder.encode_special_tokens = True  # "<|endoftext|>" in a source file is text, not a document's end
        self._eos = [tokenizer.eos_token_id]

    def __call__(self, samples: Iterable[Sample]) -> Iterator[Encoded]:
        for batch in _batches(_marked(samples), lambda item: len(item[0])):
            encodings = _on_all_cores(self._encoder.encode_batch_fast, [text for text, _, _ in batch])
            for encoding, (_, first, last) in zip(encodings, batch, strict=True):
                ids = encoding.ids
                if first:
                    ids = self._before + ids
                yield Encoded(ids + self._eos if last else ids, None, last)


class _InstructEncoder:
    """Prompt and completion as one text where the prompt's tokens open it, as they mostly do; else one after the other.

    A token that reaches over the border would not be there when the model is asked, so none is made.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._encoder = _encoder(tokenizer)
        self._before = _opening(self._encoder)
        self._eos = int(tokenizer.eos_token_id)

    def __call__(self, samples: Iterable[Instruction]) -> Iterator[Encoded]:
        for batch in _batches(samples, lambda sample: sample.characters):
            prompts = self._encode([sample.prompt for sample in batch])
            wholes = self._encode([sample.prompt + sample.completion for sample in batch])
            grown = [at for at, prompt in enumerate(prompts) if wholes[at][: len(prompt)] != prompt]
            apart = self._encode([batch[at].completion for at in grown])
            for at, completion in zip(grown, apart, strict=True):
                wholes[at] = prompts[at] + completion
            for prompt, whole in zip(prompts, wholes, strict=True):
                if whole[len(prompt) :][-1:] != [self._eos]:  # a completion may spell it
                    whole = [*whole, self._eos]
                learned = np.ones(len(self._before) + len(whole), dtype=bool)
                learned[: len(self._before) + len(prompt)] = False
                yield Encoded(self._before + whole, learned, last=True)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in _on_all_cores(self._encoder.encode_batch_fast, texts)]


class _ChatEncoder:
    """A conversation is what its template writes, with nothing before or after. Learned is each token that has a
    character of the assistant's, as with transformers' `return_assistant_tokens_mask`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._encoder = _encoder(tokenizer)

    def __call__(self, samples: Iterable[Conversation]) -> Iterator[Encoded]:
        for batch in _batches(samples, lambda sample: sample.characters):
            encodings = _on_all_cores(self._encoder.encode_batch, [sample.text for sample in batch])
            for sample, encoding in zip(batch, encodings, strict=True):
                yield Encoded(encoding.ids, _within(encoding.offsets, sample.spans), last=True)


def _within(offsets: list[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens overlap a span; both in characters."""
    starts, ends = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2).T
    learned = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        learned |= (starts < end) & (ends > start)
    return learned


def opening(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The special tokens that a tokenizer puts before a text, mostly none or a BOS."""
    return _opening(_encoder(tokenizer))


def _opening(encoder: Tokenizer) -> list[int]:
    whole = encoder.encode("a", add_special_tokens=True).ids
    bare = encoder.encode("a", add_special_tokens=False).ids
    starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
    return list(whole[: starts[0]]) if starts else []


def _encoder(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.no_truncation()  # a tokenizer saved with these on would cut or pad documents in silence
    encoder.no_padding()
    return encoder


def _on_all_cores(encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
    with all_cores():
        return encode(texts, add_special_tokens=False)


def _marked(samples: Iterable[Sample]) -> Iterator[tuple[str, bool, bool]]:
    """Pieces of text, and whether each is its document's first and last."""
    for sample in samples:
        pieces = sample.pieces()
        piece: str | None = next(pieces)  # a sample has text
        first = True
        while piece is not None:
            following = next(pieces, None)
            yield piece, first, following is None
            piece, first = following, False


def _batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lists of items, each of at least BATCH_CHARACTERS but the last."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += size(item)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
