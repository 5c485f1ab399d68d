"""Conversations from .jsonl files: their tokens, and which of them the assistant wrote.

A line is an object with a list `messages` of objects with `role` and `content`, and perhaps `tools`. As in
Megatron's SFT data, a line may hold several conversations if each begins with a system message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.common.files import open_outside

Message = dict[str, Any]

#: What a chat template has around the assistant's part for `return_assistant_tokens_mask`.
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Conversation:
    """Messages, and where they come from."""

    messages: list[Message]
    #: Definitions for the chat template, or None.
    tools: list[Any] | None
    #: `file:line`, for messages.
    place: str
    #: First byte of its line in the file, and its number among the conversations of the line.
    offset: int = 0
    part: int = 0


@dataclass(frozen=True)
class Encoded:
    """Tokens of a conversation."""

    ids: list[int]
    #: Of each token, whether the assistant wrote it.
    trained: list[bool]


def read_conversations(path: str | os.PathLike[str]) -> Iterator[Conversation]:
    """Read the conversations of a file in order; empty lines are skipped."""
    with open_outside(os.fspath(path)) as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{os.fspath(path)}:{number}"
                yield from parse_line(line, place, offset)
            offset += len(line)


def parse_line(line: bytes, place: str, offset: int = 0) -> Iterator[Conversation]:
    """Read the conversations of one line; `place` is what messages call it, `offset` its first byte."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{place}: not JSON: {problem}") from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{place}: give an object with a list "messages", as in {{"messages": [...]}}')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{place}: every message is an object with "role" and "content"')
    starts = [i for i, message in enumerate(messages) if i == 0 or message["role"] == "system"]
    for part, (start, end) in enumerate(zip(starts, [*starts[1:], len(messages)], strict=True)):
        yield Conversation(messages[start:end], found.get("tools"), place, offset, part)


class Encoder:
    """A tokenizer's chat template, and the assistant's part of what it renders.

    If the template marks it with `{% generation %}`, the marks are used. Otherwise an assistant's turn begins
    where the prompt for it ends (`add_generation_prompt`), and ends with the template's text for the message.

    Args:
        folder: of the tokenizer, or transformers' tokenizer itself.
        called: what messages call it; default: `folder`.
    """

    def __init__(self, folder: Any, called: str | os.PathLike[str] | None = None) -> None:
        if isinstance(folder, (str, os.PathLike)):
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(os.fspath(folder))
        else:
            self.tokenizer, folder = folder, folder.name_or_path
        template, where = self.tokenizer.chat_template, folder if called is None else called
        if not isinstance(template, str):
            what = "no chat template" if template is None else "several chat templates"
            raise ValueError(f"the tokenizer in {where} has {what}: conversations need one")
        if not self.tokenizer.is_fast:
            raise ValueError(f"the tokenizer in {where} has no tokenizer.json, which gives tokens a place")
        self.marked = bool(_GENERATION.search(template))

    def encode(self, conversation: Conversation) -> Encoded:
        if self.marked:
            found = self._render(conversation, tokenize=True)
            return Encoded(list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]])
        return self.tokens(*self.text(conversation))

    def text(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and where in it the assistant's turns begin and end."""
        return self._marks(conversation) if self.marked else self._spans(conversation)

    def prompt(self, conversation: Conversation) -> str:
        """The conversation's text with the beginning of the assistant's next turn."""
        return str(self._render(conversation, add_generation_prompt=True))

    def tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """Tokens of a text; those that begin in one of the spans are trained."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [any(start <= first < end for start, end in spans) for first, _ in found["offset_mapping"]]
        return Encoded(list(found["input_ids"]), trained)

    def _spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        text, spans = str(self._render(conversation)), []
        for i, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            prompt = str(self._render(conversation, i, add_generation_prompt=True))
            turn = str(self._render(conversation, i + 1))
            # A template may put an empty thought into the prompt that the turn itself writes otherwise.
            start = len(os.path.commonprefix([prompt, text]))
            content = message.get("content")
            written = content.strip() if isinstance(content, str) else ""
            if not text.startswith(turn) or written not in text[start : len(turn)]:
                raise ValueError(
                    f"{conversation.place}: message {i + 1} reads differently once others follow it, so "
                    "the chat template does not say which tokens are the assistant's: end the "
                    "conversation there, or use a template with {% generation %}"
                )
            spans.append((start, len(turn)))
        return text, spans

    def _marks(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """As `_spans`, by the marks of the template."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refused(conversation):
            (text,), (spans,) = render_jinja_template(
                [conversation.messages],
                conversation.tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return str(text), [(start, end) for start, end in spans]

    def _render(self, conversation: Conversation, messages: int | None = None, **how: Any) -> Any:
        if how.pop("tokenize", False):
            how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        else:
            how["tokenize"] = False
        with _refused(conversation):
            return self.tokenizer.apply_chat_template(
                conversation.messages[:messages], tools=conversation.tools, **how
            )


@contextmanager
def _refused(conversation: Conversation) -> Iterator[None]:
    try:
        yield
    except ValueError:
        raise
    except Exception as problem:  # a template raises what it likes
        raise ValueError(f"{conversation.place}: the chat template: {problem}") from None
