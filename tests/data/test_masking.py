"""Prompts are not learned: ids and masks beside those that transformers' own tokenizer makes, token by token."""

import json
from itertools import pairwise
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from shardlab.data import IGNORED, prepare_data
from shardlab.data.tokens import TokenStream
from shardlab.errors import UserError
from tests.data.chat_tokenizer import CHATML, FORGETFUL, INST, MARKED, MARKED_CONTENT, save_tokenizer

PAIRS = [
    ("What is two plus two?", " It is four."),
    ("two plus two =", " four"),
    ("Hello there,\n", "hi!\n\nhi!"),
    ("Ünïcode 🎉? ", "ja 🎉"),
    ("<|im_start|>user\nhi<|im_end|>\n", "hello<|im_end|>"),
]
CHATS = [
    [{"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "It is four."}],
    [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "Hello there 🎉"},
        {"role": "assistant", "content": "hi! ünï"},
        {"role": "user", "content": "two plus two?"},
        {"role": "assistant", "content": "four\n"},
    ],
    [{"role": "user", "content": "no answer"}],
    [
        {"role": "user", "content": "twice"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"},
    ],
]


def _write(path: Path, records: list[dict]) -> tuple[str, ...]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return (str(path),)


def _documents(stream: TokenStream) -> list[tuple[list[int], list[bool]]]:
    starts = stream.ends - stream.lengths
    return [
        (stream.tokens[start:end].tolist(), stream.learned_between(start, end).tolist())
        for start, end in zip(starts.tolist(), stream.ends.tolist(), strict=True)
    ]


@pytest.fixture
def instruct(tmp_path, section):
    """documents (ids, learned) of pairs, and the tokenizer."""

    def prepare(pairs: list[tuple[str, str]], *, bos: bool = False):
        tokenizer = save_tokenizer(tmp_path / "tokenizer", bos=bos)
        files = _write(tmp_path / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
        recipe = section(
            files,
            format="instruct",
            tokenizer=str(tmp_path / "tokenizer"),
            evaluation_fraction=0.0,
            sequence_length=512,
        )
        return _documents(prepare_data(recipe).train.stream), tokenizer

    return prepare


@pytest.mark.parametrize("bos", [False, True])
def test_a_prompt_is_masked_and_its_completion_and_eos_are_learned(instruct, bos):
    """https://github.com/huggingface/trl/issues/1623"""
    documents, tokenizer = instruct(PAIRS, bos=bos)
    for (prompt, completion), (ids, learned) in zip(PAIRS, documents, strict=True):
        whole = tokenizer(prompt + completion)["input_ids"]
        if whole[-1] != tokenizer.eos_token_id:  # a completion that spells it is not given another
            whole = [*whole, tokenizer.eos_token_id]
        masked = len(tokenizer(prompt)["input_ids"])
        assert ids == whole
        assert learned == [False] * masked + [True] * (len(whole) - masked)
    assert (documents[0][0][0] == tokenizer.bos_token_id) == bos


@pytest.mark.parametrize(("prompt", "completion"), [("It is fo", "ur."), ("two plus two = ", "four")])
def test_a_prompts_tokens_are_those_that_the_model_will_be_asked_with(instruct, prompt, completion):
    """Where prompt and completion would grow together, the prompt's own tokens come first."""
    ((ids, learned),), tokenizer = instruct([(prompt, completion)])
    asked = tokenizer(prompt)["input_ids"]
    assert tokenizer(prompt + completion)["input_ids"][: len(asked)] != asked
    assert ids == [*asked, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    assert learned == [False] * len(asked) + [True] * (len(ids) - len(asked))


@pytest.fixture
def chat(tmp_path, section):
    """documents (ids, learned) of conversations, the tokenizer, and the data."""

    def prepare(chats: list, template: str | None, **fields):
        tokenizer = save_tokenizer(tmp_path / "tokenizer", template)
        files = _write(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats])
        settings = {"tokenizer": str(tmp_path / "tokenizer"), "evaluation_fraction": 0.0, "sequence_length": 512}
        data = prepare_data(section(files, format="chat", **{**settings, **fields}))
        return _documents(data.train.stream), tokenizer, data

    return prepare


@pytest.mark.parametrize("template", [MARKED, MARKED_CONTENT])
def test_the_templates_own_marks_say_what_is_learned(chat, template):
    documents, tokenizer, _ = chat(CHATS, template)
    for messages, (ids, learned) in zip(CHATS, documents, strict=True):
        expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == expected["input_ids"]
        assert learned == [bool(flag) for flag in expected["assistant_masks"]]


def _by_prefixes(tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """What each assistant's turn adds to the tokens of the conversation so far."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    learned = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False)
            after = tokenizer.apply_chat_template(messages[: index + 1], return_dict=False)
            assert (ids[: len(after)], after[: len(before)]) == (after, before)
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, learned


@pytest.mark.parametrize(("template", "chats"), [(CHATML, CHATS), (INST, [CHATS[0], CHATS[0] * 2])])
def test_without_marks_learned_is_what_the_assistants_turns_add(chat, template, chats):
    documents, tokenizer, _ = chat(chats, template)
    assert documents == [_by_prefixes(tokenizer, messages) for messages in chats]


def test_with_and_without_marks_the_same_is_learned(chat, tmp_path):
    assert chat(CHATS, CHATML)[0] == chat(CHATS, MARKED)[0]


def test_a_conversation_without_an_assistant_is_left_out_and_counted(chat):
    """https://github.com/huggingface/trl/issues/6668"""
    _, _, data = chat(CHATS, CHATML)
    assert data.report.masked_rows == 1
    assert len(data.train) == 1
    assert data.train.valid_tokens([0]) == sum(sum(learned) for _, learned in _documents(data.train.stream))


@pytest.mark.parametrize(
    ("messages", "template", "problem"),
    [
        ([{"role": "assistant", "content": "x"}], INST, "1 chat template (FILE:1 roles must take turns)"),
        (CHATS[1], FORGETFUL, "1 chat template (FILE:1 it writes message 3 otherwise when others follow"),
        ([], CHATML, "1 empty"),
        ("hello", CHATML, "1 wrong type (FILE:1 'messages' is text, not a list of messages)"),
        (["hello"], CHATML, "1 wrong type (FILE:1 message 1 is text, not an object)"),
        ([{"from": "human", "value": "x"}], CHATML, "1 missing field (FILE:1 message 1 has no 'role'; it has 'from'"),
        ([{"role": "user"}], CHATML, "1 missing field (FILE:1 message 1 has no 'content')"),
        (
            [CHATS[0][0], {"role": "assistant", "content": " "}],
            CHATML,
            "1 whitespace only (FILE:1 message 2 (assistant))",
        ),
        ([CHATS[0][0], {"role": "assistant", "content": "a\0"}], CHATML, "1 NUL"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_a_bad_record(chat, tmp_path, messages, template, problem):
    with pytest.raises(UserError) as caught:
        chat([messages, CHATS[0]], template)
    assert problem.replace("FILE", str(tmp_path / "chats.jsonl")) in str(caught.value)


def test_a_tokenizer_without_a_chat_template_is_refused(chat):
    for fields in ({}, {"tokenizer": "bytes"}):
        with pytest.raises(UserError, match=r"has no chat template; give data\.tokenizer a directory"):
            chat(CHATS, None, **fields)


def test_plain_text_has_no_prompts(section, write_text):
    with pytest.raises(UserError, match=r"data\.format needs records with prompt and completion"):
        prepare_data(section(write_text("text"), format="instruct"))


def test_a_tables_empty_keys_are_not_the_templates_business(tmp_path, section):
    """Parquet gives every message of a column all the keys that one of them has."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CHATML.replace("{{ message.content }}", "{{ message }}"))
    rows = [CHATS[0], [{**CHATS[0][0], "name": "Ada"}, CHATS[0][1]]]
    parquet.write_table(pa.table({"messages": rows}), tmp_path / "chats.parquet")
    datasets.Dataset.from_dict({"messages": rows}).save_to_disk(tmp_path / "saved")
    for source in ("chats.parquet", "saved"):
        recipe = section(
            (str(tmp_path / source),),
            format="chat",
            tokenizer=str(tmp_path / "tokenizer"),
            evaluation_fraction=0.0,
            sequence_length=512,
        )
        ids = [ids for ids, _ in _documents(prepare_data(recipe).train.stream)]
        assert ids == [tokenizer.apply_chat_template(messages, return_dict=False) for messages in rows]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_the_tokenizers_documents_with_prompts_ignored(chat, packing):
    """Each row taken apart where positions restart gives documents back; targets are the next tokens, if learned."""
    documents, _, data = chat(CHATS[:2] * 3, CHATML, packing=packing, sequence_length=128)
    batch = {key: values.tolist() for key, values in data.train.batch(range(len(data.train))).items()}
    assert (len(data.train) < 6) == packing
    found = []
    for inputs, targets, positions in zip(*(batch[k] for k in ("input_ids", "targets", "position_ids")), strict=True):
        starts = [*(at for at, position in enumerate(positions) if position == 0), len(inputs)]
        for start, end in pairwise(starts):
            learned = [False, *(target != IGNORED for target in targets[start : end - 1])]
            assert [t for t in targets[start : end - 1] if t != IGNORED] == [
                token for token, flag in zip(inputs[start:end], learned, strict=True) if flag
            ]
            assert targets[end - 1] == IGNORED
            if any(learned):
                found.append((inputs[start:end], learned))
    assert sorted(found) == sorted(documents)
