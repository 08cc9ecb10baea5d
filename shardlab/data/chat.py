"""A tokenizer's chat template, and which characters of what it writes the assistant says."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shardlab.data.records import BadRecord, Problem
from shardlab.errors import UserError

Messages = Sequence[Mapping[str, Any]]
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


class ChatTemplate:
    """The chat template of a tokenizer. `digest` identifies it. Raises UserError if the tokenizer has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        try:
            self._template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                "data.format chat: the tokenizer has no chat template; give data.tokenizer a directory whose tokenizer "
                "has one (chat_template.jinja), or set data.format to instruct"
            ) from error
        self._special_tokens = tokenizer.special_tokens_map
        self._marked = _GENERATION_MARK.search(self._template) is not None
        self.digest = hashlib.sha256(f"{self._template} {sorted(self._special_tokens.items())}".encode()).hexdigest()

    def render(self, messages: Messages) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The conversation as text, and the spans of its characters that the assistant says.

        They are those between the template's own generation marks. A template without marks is asked for the
        conversation up to each assistant's turn and with it: the turn is what comes on top.
        Raises BadRecord for messages that the template refuses, or whose earlier turns it writes otherwise once there
        are later ones.
        """
        try:
            if self._marked:
                rendered, marked = self._call(messages, return_assistant_tokens_mask=True)
                text, spans = rendered[0], [(start, end) for start, end in marked[0]]
            else:
                text = self._text(messages, prompt=False)
                spans = [
                    self._turn(text, messages, index) for index, message in enumerate(messages) if _speaks(message)
                ]
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise BadRecord(Problem.TEMPLATE, reason or type(error).__name__) from error
        if not text:
            raise BadRecord(Problem.TEMPLATE, "it writes nothing")
        return text, tuple(spans)

    def _turn(self, text: str, messages: Messages, index: int) -> tuple[int, int]:
        before = self._text(messages[:index], prompt=True)
        after = self._text(messages[: index + 1], prompt=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise BadRecord(
                Problem.TEMPLATE,
                f"it writes message {index + 1} otherwise when others follow; mark in the template what is learned, "
                "with {% generation %} … {% endgeneration %}",
            )
        return len(before), len(after)

    def _text(self, messages: Messages, *, prompt: bool) -> str:
        rendered, _ = self._call(messages, add_generation_prompt=prompt)
        return str(rendered[0])

    def _call(self, messages: Messages, **options: bool) -> Any:
        return render_jinja_template(
            conversations=[list(messages)], chat_template=self._template, **options, **self._special_tokens
        )


def _speaks(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant"
