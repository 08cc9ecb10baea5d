"""The tokenizer of a recipe: bytes, a byte-level BPE trained on the corpus, or a Hugging Face directory.

Each is a `transformers` fast tokenizer, so that it is saved beside the model and loads with `AutoTokenizer`. The first
two give back any text exactly: `decode(encode(text)) == text`.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardlab.data.cache import cached
from shardlab.data.corpus import CheckedCorpus
from shardlab.errors import UserError

END_OF_TEXT = "<|endoftext|>"
_BPE_NAME = re.compile(r"bpe-([1-9][0-9]*)k")
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_FORMAT = 1  # raised when a trained tokenizer would come out differently
_TRAINING_CHARACTERS = 8 << 20  # more text hardly moves the merges, and costs seconds
_TRAINING_PIECE = 4096  # characters


def make_tokenizer(kind: str, corpus: CheckedCorpus, cache: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a recipe's `data.tokenizer` names: "bytes", "bpe-<N>k" (N x 1024 tokens) or a directory.

    A small corpus may not have N x 1024 different pieces: the vocabulary is `len(tokenizer)`, whatever the name says.
    Raises UserError if `kind` is none of these, or the directory has no usable tokenizer.
    """
    if kind == "bytes":
        return _byte_tokenizer()
    if match := _BPE_NAME.fullmatch(kind):
        key = hashlib.sha256(f"{_FORMAT} {kind} {corpus.digest}".encode()).hexdigest()[:32]

        def build(directory: Path) -> None:
            _train_bpe(corpus, int(match[1]) * 1024).save_pretrained(str(directory))

        return cached(cache / "tokenizers", f"{kind}-{key}", build, PreTrainedTokenizerFast.from_pretrained)
    return tokenizer_directory(kind)


_PROBE = "The 3 quick foxes didn't jump:\n\tfor x in range(10): print(x ** 2)  # naïve, 東京, 🙂\n"


def refuse_other_tokens(
    first: PreTrainedTokenizerFast, second: PreTrainedTokenizerFast, first_name: str, second_name: str
) -> None:
    """Raises UserError where two tokenizers don't make the same ids of a text, naming the first thing that differs.

    Equal sizes are not enough: with two ids swapped, each model would be judged on the other's text. Nor are equal
    vocabularies: with other merges a text becomes other tokens of them.
    """
    ours, theirs = first.get_vocab(), second.get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            other = theirs.get(token)
            said = f"missing in {second_name}" if other is None else f"{other} in {second_name}"
            raise UserError(f"the tokenizers differ: {token!r} is {number} in {first_name}, {said}")
    if len(theirs) > len(ours):
        token = min(theirs.keys() - ours.keys(), key=lambda token: theirs[token])
        raise UserError(
            f"the tokenizers differ: {token!r} is {theirs[token]} in {second_name}, missing in {first_name}"
        )
    for role in ("eos", "bos", "unk"):
        one, other = (getattr(tokenizer, f"{role}_token_id") for tokenizer in (first, second))
        if one != other and None not in (one, other):  # a GGUF file does not always say
            raise UserError(
                f"the tokenizers differ: {role} is {one} in {first_name} and {other} in {second_name}, of the same "
                "vocabulary"
            )
    # Words of the vocabulary itself, spread over it, meet merges that no text of ours would.
    words = [first.decode([number]) for number in range(0, len(ours), max(1, len(ours) // 2000))]
    for text in (_PROBE, " ".join(words), "".join(words)):
        one, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (first, second))
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
            said = first.decode(one[at : at + 5])
            raise UserError(
                f"the tokenizers differ: of one vocabulary, they split {said!r} otherwise in {first_name} and in "
                f"{second_name} (their merges or their normalisation differ)"
            )


def named_tokenizer(kind: str) -> bool:
    """Whether `kind` is one of ours, not a directory."""
    return kind == "bytes" or _BPE_NAME.fullmatch(kind) is not None


@contextmanager
def all_cores() -> Iterator[None]:
    """Let the `tokenizers` library use its threads, though the ranks' environment says no: they would be in the way of
    training, but while one rank encodes the others wait.

    The library reads the variable at each call. It stays set, so that a later fork brings no warning.
    """
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "true"
    try:
        yield
    finally:
        os.environ[_PARALLELISM] = before or "false"


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash of all that decides which tokens a text becomes."""
    return hashlib.sha256(f"{tokenizer.eos_token_id} {tokenizer.backend_tokenizer.to_str()}".encode()).hexdigest()


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 tokens, each byte's id its value, and the end of text as 256: a BPE without merges."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # No regex: it only finds word ends for merges, of which there are none.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _train_bpe(corpus: CheckedCorpus, vocabulary_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # so that every text can be written
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    with all_cores():
        tokenizer.train_from_iterator(_sample(corpus, _TRAINING_CHARACTERS), trainer)
    return _wrap(tokenizer)


def _sample(corpus: CheckedCorpus, budget: int) -> Iterator[str]:
    """About `budget` characters, spread evenly over the corpus: a piece is taken whenever the sample lags behind."""
    share = min(1.0, budget / corpus.report.characters)
    seen = taken = 0
    for sample in corpus.samples():
        for piece in sample.pieces(_TRAINING_PIECE):
            if taken <= seen * share:
                taken += len(piece)
                yield piece
            seen += len(piece)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tokenizer_directory(name: str, key: str = "data.tokenizer") -> PreTrainedTokenizerFast:
    """The tokenizer saved in a directory, which the recipe's `key` names. Raises UserError if none can be used."""
    directory = Path(name).expanduser()
    if not directory.is_dir():
        named = "neither 'bytes', 'bpe-<N>k' (for example bpe-8k) nor" if key == "data.tokenizer" else "not"
        raise UserError(f"{key}: {name!r} is {named} a directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a directory that holds no tokenizer
        raise UserError(
            f"{key}: transformers finds no tokenizer in {directory} (it should hold a tokenizer.json)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not tokenizer.get_vocab():
        raise UserError(f"{key}: {directory} holds no fast tokenizer (a tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{key}: the tokenizer in {directory} has no eos token to end documents with; set one and save it"
        )
    return tokenizer


def nominal_vocabulary(kind: str) -> int:
    """Entries of the tokenizer that `data.tokenizer` names, without training it; a small corpus may have fewer."""
    match = _BPE_NAME.fullmatch(kind)
    if match is not None:
        return int(match[1]) * 1024
    return len(_byte_tokenizer()) if kind == "bytes" else len(tokenizer_directory(kind))
