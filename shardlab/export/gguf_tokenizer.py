"""A byte-level BPE tokenizer as a GGUF file's metadata, and back.

llama.cpp does not run a tokenizer.json: it knows the common ways of splitting text by name. One that it does not know
would tokenize differently without a word, so it is refused here.
"""

import json
from collections.abc import Mapping
from typing import Any

from shardlab.errors import UserError
from shardlab.export.gguf_file import Value

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's kinds of token; an unused one is neither read from a text nor written."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}
_GPT2 = "gpt-2"
_WHOLE_WORDS = "llama-bpe"  # looks a word up before it merges
# llama.cpp refuses a file without merges. Neither character stands for a byte, so this one never applies.
_NO_MERGE = "\u2042 \u2042"


def metadata(tokenizer: Any, rows: int) -> dict[str, Value]:
    """`tokenizer`'s, with as many tokens as the embedding has `rows`: those without a token are marked unused.

    Raises UserError for a tokenizer that llama.cpp would run differently.
    """
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    model = whole["model"]
    _check_model(model)
    pre = _pre_tokenizer(whole, model)
    if model["merges"] and model.get("ignore_merges", False) != (pre == _WHOLE_WORDS):
        raise UserError(f"the tokenizer's ignore_merges is not that of {pre}: llama.cpp would tokenize differently")
    texts, kinds = [f"[PAD{row}]" for row in range(rows)], [UNUSED] * rows
    for text, row in model["vocab"].items():
        texts[row], kinds[row] = text, NORMAL
    for token in whole["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            raise UserError(f"the token {token['content']!r} takes spaces with it, which llama.cpp does not do")
        texts[token["id"]], kinds[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges or [_NO_MERGE],
        **_special(tokenizer),
    }


def rebuild(fields: Mapping[str, Any]) -> Any:
    """A transformers fast tokenizer from the metadata of a file (key -> value) that `metadata` describes.

    Raises UserError for a file with another kind of tokenizer.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    split = next((regex for regex, name in _SPLITS.items() if name == pre), None)
    if kind != "gpt2" or (split is None and pre != _GPT2):
        raise UserError(f"the file's tokenizer ({kind}, {pre}) is none that shardlab knows; give --tokenizer DIR")
    texts, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {text: row for row, (text, k) in enumerate(zip(texts, kinds, strict=True)) if k != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"] if merge != _NO_MERGE]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == _WHOLE_WORDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(texts, kinds, strict=True) if k == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(texts, kinds, strict=True) if k == USER_DEFINED]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=texts[fields["tokenizer.ggml.eos_token_id"]],
        clean_up_tokenization_spaces=False,
    )


def _check_model(model: Mapping[str, Any]) -> None:
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise UserError(f"gguf export knows byte-level BPE tokenizers, not {model['type']} ones from sentencepiece")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"the tokenizer's {key} is {model[key]!r}: llama.cpp has none")


def _pre_tokenizer(whole: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """llama.cpp's name for how the text is split before merges apply."""
    normalizer = whole.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":  # text is NFC almost always; llama.cpp takes it as it is
        raise UserError(f"the tokenizer normalizes text ({normalizer['type']}), which llama.cpp does not do")
    steps = whole.get("pre_tokenizer") or {"type": "none"}
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    last = steps[-1]
    if last["type"] != "ByteLevel":
        raise UserError(f"gguf export knows byte-level BPE tokenizers, not a pre-tokenizer {last['type']}")
    if last["add_prefix_space"]:
        raise UserError("the tokenizer puts a space before a text (add_prefix_space), which llama.cpp does not do")
    if len(steps) == 1 and (last["use_regex"] or not model["merges"]):  # without merges no split matters
        return _GPT2
    split = steps[0]
    regex = split.get("pattern", {}).get("Regex") if split["type"] == "Split" and len(steps) == 2 else None
    if last["use_regex"] or regex not in _SPLITS or split["behavior"] != "Isolated" or split["invert"]:
        raise UserError(f"llama.cpp has no name that is known here for how the tokenizer splits text: {steps}")
    return _SPLITS[regex]


def _special(tokenizer: Any) -> dict[str, Value]:
    eos = tokenizer.eos_token_id
    # Without an id of its own llama.cpp takes 11; where there is no bos, the end of one text is the begin of the next.
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    adds_bos, adds_eos = framed[:1] == [bos], framed[-1:] == [eos]
    if framed != [bos] * adds_bos + plain + [eos] * adds_eos:
        raise UserError(f"the tokenizer frames a text in tokens that a gguf file can't say: {framed} of {plain}")
    found: dict[str, Value] = {
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.add_eos_token": adds_eos,
    }
    if tokenizer.pad_token_id is not None:
        found["tokenizer.ggml.padding_token_id"] = tokenizer.pad_token_id
    if tokenizer.unk_token_id is not None:
        found["tokenizer.ggml.unknown_token_id"] = tokenizer.unk_token_id
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        found["tokenizer.chat_template"] = template
    return found
