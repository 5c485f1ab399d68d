"""Conversations of files: their tokens, and which of them the assistant wrote.

A row has one of the forms of `forms.FORMS`. As in Megatron's SFT data, it may hold several conversations if
each begins with a system message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_nemotron3.common.switches import CONVERSATIONS, EnvironmentSetting
from megatron_nemotron3.train.data.chat_template import RESERVED, ChatTemplate, Rendered, Span
from megatron_nemotron3.train.data.forms import (
    FORMS,
    LINE,
    Findings,
    Message,
    messages_of,
    read_rows,
    text_of,
)
from megatron_nemotron3.train.data.tokenizer import read_tokenizer
from megatron_nemotron3.train.data.workers import worked


@dataclass(frozen=True)
class Reading:
    """How rows become conversations: --format and --chat-template-kwargs."""

    #: Of `FORMS`; "": found for each row.
    form: str = ""
    #: Variables of the chat template, a JSON object; "": none.
    variables: str = ""

    @classmethod
    def of(cls, form: str | None, variables: str | None) -> Reading:
        """Check the values of the options."""
        if form and form not in FORMS:
            raise ValueError(f"--format {form}: give {', '.join(FORMS)}")
        if not variables:
            return cls(form or "")
        given = f"--chat-template-kwargs {variables}"
        try:
            found = json.loads(variables)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{given}: not JSON: {problem}") from None
        if not isinstance(found, dict):
            raise ValueError(f'{given}: give an object, as in {{"enable_thinking": false}}')
        if taken := [name for name in RESERVED if name in found]:
            raise ValueError(f"{given}: {taken[0]} is of the conversation: leave it out")
        return cls(form or "", json.dumps(found, sort_keys=True) if found else "")

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Read what `text` wrote."""
        try:
            form, variables = map(str, json.loads(text or '["", ""]'))
        except (TypeError, ValueError, RecursionError):
            raise ValueError(f"{CONVERSATIONS}={text}: give a JSON list of two texts") from None
        return cls.of(form, variables)

    def text(self) -> str:
        """For `NEMOTRON3_CONVERSATIONS`; "" by default."""
        return json.dumps([self.form, self.variables]) if self != Reading() else ""

    def options(self) -> list[str]:
        """The words of a command line."""
        words = ["--format", self.form] if self.form else []
        return [*words, "--chat-template-kwargs", self.variables] if self.variables else words


#: Characters of a text that are tokenized: more than a million tokens of words.
_LONGEST = 6 << 20
#: Perhaps a half of a character: as an escape, or in bytes that Python's JSON takes.
_SURROGATE = re.compile(rb"\\u[dD]|\xed[\xa0-\xbf]")
#: What the training processes are told.
READING = EnvironmentSetting(CONVERSATIONS, Reading.parse)


@dataclass(frozen=True)
class Conversation:
    """Messages, and where they come from."""

    messages: list[Message]
    #: Definitions for the chat template, or None.
    tools: list[Any] | None
    #: `file:line`, for messages.
    place: str
    #: First byte of its line in the file (-1: it is no line), and its number in the row.
    offset: int = 0
    part: int = 0
    #: Variables of the chat template.
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """Tokens of a conversation."""

    ids: list[int]
    #: Of each token, whether the assistant wrote it.
    trained: list[bool]
    #: What is to be said about it, and the case.
    remarks: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)


def read_conversations(
    path: str | os.PathLike[str], form: str = "", findings: Findings | None = None
) -> Iterator[Conversation]:
    """Read the conversations of a file in order; empty lines are skipped."""
    for place, offset, line in read_rows(path):
        yield from parse_line(line, place, offset, form, findings)


def encoded_conversations(
    path: str | os.PathLike[str],
    encode: Callable[[Conversation], Encoded],
    form: str,
    findings: Findings,
    forks: bool = True,
) -> Iterator[tuple[Conversation, Encoded]]:
    """Read and encode the conversations of a file in order; at its end `findings` has what is to be said."""
    of_encoding = Findings()  # other processes encode behind what is read: their remarks come last
    for conversation, encoded in worked(read_conversations(path, form, findings), encode, forks):
        for remark, case in encoded.remarks:
            of_encoding.add(remark, case)
        yield conversation, encoded
    findings.remarks |= of_encoding.remarks


def parse_line(
    line: bytes, place: str, offset: int = 0, form: str = "", findings: Findings | None = None
) -> Iterator[Conversation]:
    """Read the conversations of one row; `place` is what messages call it, `offset` its first byte."""
    if len(line) > LINE:
        raise ValueError(f"{place}: the row has more than {LINE:,} bytes: cut the conversation")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{place}: not JSON: {problem}") from None
    if _SURROGATE.search(line) and (half := _lone_surrogate(row)):
        raise ValueError(f"{place}: {half} is half of a character: write the whole one, or none")
    try:
        found = row if isinstance(row, dict) else {}
        findings = Findings() if findings is None else findings
        messages, tools, variables = messages_of(found, form, place, findings)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{place}: {problem}") from None
    starts = [i for i, message in enumerate(messages) if i == 0 or message["role"] == "system"]
    if len(starts) > 1:
        findings.add("a system message in a row begins another conversation", place)
    for part, (start, end) in enumerate(zip(starts, [*starts[1:], len(messages)], strict=True)):
        yield Conversation(messages[start:end], tools, place, offset, part, variables)


def _lone_surrogate(row: Any) -> str:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as problem:
        return f"\\u{ord(problem.object[problem.start]):04x}"
    return ""


class Encoder:
    """A tokenizer's chat template, and the assistant's part of what it renders.

    If the template marks it with `{% generation %}`, the marks are used. Otherwise an assistant's turn begins
    behind the header that a prompt for it ends with, and ends with the template's text for the message.
    A thought that the prompt begins is part of the turn.

    Args:
        folder: of the tokenizer, or transformers' tokenizer itself.
        called: what messages call it; default: `folder`.
        variables: of the chat template, as JSON; those of a conversation have precedence.
        media: the template takes lists of parts as they are.
    """

    def __init__(
        self,
        folder: Any,
        called: str | os.PathLike[str] | None = None,
        variables: str = "",
        media: bool = False,
    ) -> None:
        if isinstance(folder, (str, os.PathLike)):
            self.tokenizer = read_tokenizer(folder, called)
        else:
            self.tokenizer, folder = folder, folder.name_or_path
        template, where = self.tokenizer.chat_template, folder if called is None else called
        if not self.tokenizer.is_fast:
            raise ValueError(f"the tokenizer in {where} has no tokenizer.json: conversations need one")
        if not isinstance(template, str):
            what = "no chat template" if template is None else "several chat templates"
            raise ValueError(
                f"the tokenizer in {where} has {what}: conversations need one (finetune --chat-template FILE)"
            )
        self.template = ChatTemplate(template, self.tokenizer.special_tokens_map)
        self.variables, self.media = json.loads(variables) if variables else {}, media
        self.template.require_used(self.variables, where)

    def encode(self, conversation: Conversation) -> Encoded:
        text, spans, remarks = self._read(conversation)
        try:
            encoded = self.tokens(text, spans)
        except ValueError as problem:
            raise ValueError(f"{conversation.place}: {problem}") from None
        return replace(encoded, remarks=(*remarks, *encoded.remarks))

    def text(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The conversation's text, and where in it the assistant's turns begin and end."""
        return self._read(conversation)[:2]

    def prompt(self, conversation: Conversation) -> str:
        """The conversation's text with the beginning of the assistant's next turn."""
        try:
            return self.template.prompt(*self._given(conversation))
        except ValueError as problem:
            raise ValueError(f"{conversation.place}: {problem}") from None

    def tokens(self, text: str, spans: Sequence[Span]) -> Encoded:
        """Tokens of a text; those of the spans are trained.

        A token that goes over the border of a span is none that the model meets when it answers: then the
        parts are tokenized one by one, as a prompt and its answer are.
        """
        if len(text) > _LONGEST:
            raise ValueError(
                f"a text of {len(text):,} characters, more than {_LONGEST:,}: cut the conversation"
            )
        borders = sorted({0, len(text), *(border for span in spans for border in span)})
        starts = {start for start, end in spans if start < end}
        pieces = list(zip(borders[:-1], borders[1:], strict=True))
        if not pieces:
            return Encoded([], [])
        first, *behind = (text[start:end] for start, end in pieces)
        whole, *apart = self._ids([text, first]) + self._ids(behind, self._before)
        ids = [token for piece in apart for token in piece]
        trained = [start in starts for (start, _), piece in zip(pieces, apart, strict=True) for _ in piece]
        if ids == whole:
            return Encoded(ids, trained)
        return Encoded(ids, trained, remarks=(self._straddling(whole, apart),))

    def _straddling(self, whole: Sequence[int], apart: Sequence[Sequence[int]]) -> tuple[str, str]:
        """The remark for ids that differ between a text and its parts."""
        parts = [token for piece in apart for token in piece]
        first = next((i for i, pair in enumerate(zip(whole, parts)) if pair[0] != pair[1]), 0)
        case = f"{self.tokenizer.decode(whole[first])!r}"
        return "a token went over the border of an answer, so the parts are tokenized one by one", case

    def _ids(self, texts: list[str], before: str = "") -> list[list[int]]:
        head = self._head if before else 0
        encode = self.tokenizer.backend_tokenizer.encode_batch_fast
        try:
            # One by one: an encoding takes some hundred bytes for each token.
            return [encode([before + text], add_special_tokens=False)[0].ids[head:] for text in texts]
        except BaseException as problem:
            if type(problem).__name__ != "PanicException":  # of the library in Rust, and no Exception
                raise
            raise ValueError(f"the tokenizer ends at this text: {problem}") from None

    @cached_property
    def _before(self) -> str:
        """Written before each part if the tokenizer puts a space before a text."""
        plain, behind = (self.tokenizer(one, add_special_tokens=False)["input_ids"] for one in ("a", "\na"))
        return "" if behind[-len(plain) :] == plain else "\n"

    @cached_property
    def _head(self) -> int:
        return len(self.tokenizer(self._before, add_special_tokens=False)["input_ids"]) if self._before else 0

    def _read(self, conversation: Conversation) -> tuple[str, list[Span], list[tuple[str, str]]]:
        """Text, spans of the turns that are trained, and remarks."""
        place = conversation.place
        try:
            rendered = self.template.render(*self._given(conversation))
            remarks: list[tuple[str, str]] = []
            skipped = []
            spans = list(rendered.generated or ())
            for i, message in enumerate(conversation.messages):
                if message["role"] != "assistant":
                    continue
                turn = rendered.turns.get(i)
                trained = message.get("weight", 1) == 1
                if turn is None:
                    if rendered.generated is None or not trained:
                        raise ValueError(f"the chat template does not say where message {i + 1} is: {_CURE}")
                    continue
                remarks += [(one, place) for one in _left_out(rendered, turn, message, i + 1)]
                if not trained:
                    skipped.append(turn)
                elif rendered.generated is None:
                    spans.append((_behind_header(rendered, turn, i + 1), turn[1]))
                    remarks += [(one, place) for one in _doubts(rendered, turn, message)]
        except ValueError as problem:
            raise ValueError(f"{place}: {problem}") from None
        for name in conversation.variables:
            if not self.template.uses(name):
                remark = "the chat template does not use a variable of chat_template_kwargs"
                remarks.append((remark, f"{name!r:.60} in {place}"))
        if conversation.tools and not self.template.uses("tools"):
            remarks.append(("the chat template does not use tools", place))
        if skipped:
            spans = [one for one in spans if not any(start <= one[0] < end for start, end in skipped)]
        return rendered.text, spans, remarks

    def _given(self, conversation: Conversation) -> tuple[list[Message], Any, dict[str, Any]]:
        """Arguments of `ChatTemplate.render`."""
        messages = [
            {name: one for name, one in each.items() if name != "weight"} for each in conversation.messages
        ]
        for number, message in enumerate(messages if not self.media else (), 1):
            try:
                message["content"] = text_of(message["content"])
            except ValueError as problem:
                raise ValueError(f"{conversation.place}: message {number}: {problem}") from None
        variables = {**self.variables, **conversation.variables}
        if taken := [name for name in RESERVED if name in variables]:
            raise ValueError(f"{conversation.place}: chat_template_kwargs: leave {taken[0]} out")
        return messages, conversation.tools, variables


_CURE = "use a template with {% generation %}"


def _behind_header(rendered: Rendered, turn: Span, number: int) -> int:
    """Where the assistant's part of a turn begins."""
    start = rendered.text.find(rendered.header, *turn)
    if start < 0:
        raise ValueError(
            f"message {number} does not begin with {rendered.header!r}, as its prompt does: {_CURE}"
        )
    return start + len(rendered.header)


def _doubts(rendered: Rendered, turn: Span, message: Message) -> Iterator[str]:
    """What may be missing or too much where a template does not say what the assistant wrote."""
    if not rendered.header:
        yield f"prompts do not begin an answer, so its header in the chat template is trained, too: {_CURE}"
    answer, text = str(message["content"]).strip(), rendered.text[turn[0] : turn[1]].rstrip()
    if answer and text.endswith(answer):
        yield f"the turn of an answer has no end, so the model does not learn to end it: {_CURE}"


def _left_out(rendered: Rendered, turn: Span, message: Message, number: int) -> Iterator[str]:
    """Reasoning that a turn's text lacks. Raises ValueError if it lacks the answer."""
    text = rendered.text[turn[0] : turn[1]]
    content = text_of(message["content"]) if isinstance(message["content"], str) else ""
    thought, closed, answer = content.rpartition("</think>")
    if answer.strip() not in text:
        raise ValueError(f"the chat template does not write the content of message {number} as it is")
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in text:
            raise ValueError(f"the chat template leaves out the tool calls of message {number}")
    thoughts = [thought.rpartition("<think>")[2] if closed else "", message.get("reasoning_content", "")]
    if any(one.strip() not in text for one in thoughts):
        yield (
            "the chat template leaves reasoning out, as if the model had not thought there; templates of "
            """Nemotron 3 keep it with --chat-template-kwargs '{"truncate_history_thinking": false}'"""
        )
