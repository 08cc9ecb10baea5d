"""What a record becomes: text, a prompt with its completion, or a conversation.

A form reads its columns of a record, has them checked, and gives a sample: what the encoders turn into tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardlab.data.chat import ChatTemplate
from shardlab.data.records import BadRecord, Check, Problem, kind, required

PIECE_CHARACTERS = 1 << 18  # of a document's text held at once; the encoder needs some 130 bytes per token beside it


class Sample(Protocol):
    """A document before it is tokenised. `characters` counts all its text."""

    @property
    def characters(self) -> int: ...

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """The text in pieces of about `characters`, none of them empty."""
        ...


class Form(Protocol):
    """How records of a `data.format` are read. `key` tells forms apart that give other samples."""

    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def key(self) -> str: ...

    def sample(self, fields: Mapping[str, Any], check: Check) -> Sample:
        """The sample in a record's fields. Raises BadRecord."""
        ...


@dataclass(frozen=True)
class Text:
    """A text that is learned whole."""

    text: str

    @property
    def characters(self) -> int:
        return len(self.text)

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """See `Sample`; pieces end where a word does."""
        start = 0
        while len(self.text) - start > characters:
            end = start + word_end(self.text[start : start + characters])
            yield self.text[start:end]
            start = end
        yield self.text[start:]


@dataclass(frozen=True)
class Instruction:
    """A prompt, and the completion that is learned."""

    prompt: str
    completion: str

    @property
    def characters(self) -> int:
        return len(self.prompt) + len(self.completion)

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """See `Sample`."""
        yield from Text(self.prompt + self.completion).pieces(characters)


@dataclass(frozen=True)
class Conversation:
    """A conversation as its template writes it; `spans` are the characters that the assistant says."""

    text: str
    spans: tuple[tuple[int, int], ...]

    @property
    def characters(self) -> int:
        return len(self.text)

    def pieces(self, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
        """See `Sample`."""
        yield from Text(self.text).pieces(characters)


@dataclass(frozen=True)
class TextForm:
    """`data.format: text`."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def key(self) -> str:
        return f"text {self.column}"

    def sample(self, fields: Mapping[str, Any], check: Check) -> Text:
        """See `Form`."""
        return Text(check.text(fields, self.column))


@dataclass(frozen=True)
class InstructForm:
    """`data.format: instruct`."""

    prompt: str
    completion: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.completion)

    @property
    def key(self) -> str:
        return f"instruct {self.prompt} {self.completion}"

    def sample(self, fields: Mapping[str, Any], check: Check) -> Instruction:
        """See `Form`."""
        return Instruction(check.text(fields, self.prompt), check.text(fields, self.completion))


@dataclass(frozen=True)
class ChatForm:
    """`data.format: chat`. A message that is the user's or the assistant's has to say something."""

    column: str
    template: ChatTemplate

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def key(self) -> str:
        return f"chat {self.column} {self.template.digest}"

    def sample(self, fields: Mapping[str, Any], check: Check) -> Conversation:
        """See `Form`."""
        messages = required(fields, self.column)
        if not isinstance(messages, list):
            raise BadRecord(Problem.WRONG_TYPE, f"{self.column!r} is {kind(messages)}, not a list of messages")
        if not messages:
            raise BadRecord(Problem.EMPTY, f"{self.column!r}")
        text, spans = self.template.render([_message(number, m, check) for number, m in enumerate(messages, start=1)])
        return Conversation(text, spans)


def _message(number: int, message: object, check: Check) -> dict[str, Any]:
    """A message with its texts checked; keys without a value, which a table gives to every row, are left out."""
    where = f"message {number}"
    if not isinstance(message, dict):
        raise BadRecord(Problem.WRONG_TYPE, f"{where} is {kind(message)}, not an object")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str):
        raise BadRecord(
            Problem.MISSING_FIELD, f"{where} has no 'role'; it has {', '.join(map(repr, given)) or 'nothing'}"
        )
    content = given.get("content")
    if isinstance(content, str):
        given["content"] = content = check.clean(content)
        if role in ("user", "assistant") and not content.strip() and "tool_calls" not in given:
            problem = Problem.BLANK if content else Problem.EMPTY
            raise BadRecord(problem, f"{where} ({role})")
    elif content is None and "tool_calls" not in given:
        raise BadRecord(Problem.MISSING_FIELD, f"{where} has no 'content'")
    return given


def word_end(text: str) -> int:
    """Where the last word of a text ends.

    Between a non-space and a space or newline the byte-level pre-tokenizer cuts anyway, so that pieces' tokens are the
    whole text's. (A tokenizer of another kind may differ by a token at a cut.)
    """
    for position in range(len(text) - 1, 0, -1):
        if text[position] in " \n" and not text[position - 1].isspace():
            return position
    return len(text)
