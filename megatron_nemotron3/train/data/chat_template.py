"""Chat templates: a text, and where in it each message is. They are rendered in a child with limits.

A copy of the template has a call at the beginning and end of each loop over messages, and of each
`{% generation %}`, which writes characters that no text has. So one rendering tells the place of all
messages. Without these characters its text must be that of the template itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_nemotron3.common.limits import LimitedChild, LimitError

#: Bytes and seconds of a rendering, and characters of a text.
_MEMORY, _SECONDS, _LONGEST = 512 << 20, 5, 64 << 20
#: Characters of a template; NVIDIA's have 20,000.
_SOURCE = 1 << 20
#: Unicode's noncharacters: the first that a text does not have encloses the marks.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
#: The call in the copy.
_CALL = "_nemotron3_mark"
#: What the call writes, as one group.
_WRITTEN = re.compile("(([\ufdd0-\ufdef])[a-z]\\d*\\2)")
#: What the template itself is given.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", _CALL)

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A text of the template."""

    text: str
    #: Number of a message -> where its text is, its header included.
    turns: dict[int, Span]
    #: What the template has between `{% generation %}` and its end; None if it has none.
    generated: list[Span] | None
    #: How the assistant's turn begins in a prompt, without a thought.
    header: str


class ChatTemplate:
    """A template and the special tokens of its tokenizer."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        if len(source) > _SOURCE:
            raise ValueError(f"the chat template has {len(source):,} characters, more than {_SOURCE:,}")
        import transformers.utils.chat_template_utils  # noqa: F401  (in this process, not in each child)

        self.source = source
        self._child = LimitedChild(_Renderer(source, special).answer, memory=_MEMORY, seconds=_SECONDS)

    def uses(self, name: str) -> bool:
        """Whether the template has a word of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def require_used(self, variables: Iterable[str], place: object) -> None:
        """Raise ValueError for a variable of --chat-template-kwargs that the template does not have."""
        if unknown := [name for name in variables if not self.uses(name)]:
            raise ValueError(
                f"--chat-template-kwargs: the template of {place} does not use {unknown[0]}: leave it out"
            )

    def render(
        self, messages: Sequence[Any], tools: Any = None, variables: Mapping[str, Any] | None = None
    ) -> Rendered:
        """The text of messages. Raises ValueError."""
        found = self._ask(messages, tools, variables, False)
        return Rendered(
            found["text"],
            {int(number): (start, end) for number, (start, end) in found["turns"].items()},
            None if found["generated"] is None else [(start, end) for start, end in found["generated"]],
            found["header"],
        )

    def prompt(
        self, messages: Sequence[Any], tools: Any = None, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The text of messages with the beginning of the assistant's next turn. Raises ValueError."""
        return str(self._ask(messages, tools, variables, True)["text"])

    def _ask(self, messages: Any, tools: Any, variables: Any, prompt: bool) -> Any:
        request = {"messages": messages, "tools": tools, "variables": variables or {}, "prompt": prompt}
        try:
            found = json.loads(self._child.ask(json.dumps(request).encode()))
        except LimitError as problem:
            raise ValueError(f"the chat template {problem}") from None
        if isinstance(found, str):
            raise ValueError(f"the chat template: {found}")
        return found


class _Renderer:
    """What the child does."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        self._source, self._special = source, dict(special)

    def answer(self, request: bytes) -> bytes:
        try:
            found = self._rendered(**json.loads(request))
            return json.dumps(found).encode()
        except MemoryError:
            raise
        except Exception as problem:  # a template raises what it likes
            return json.dumps(str(problem)[:500] or type(problem).__name__).encode()

    def _rendered(self, messages: Any, tools: Any, variables: dict[str, Any], prompt: bool) -> Any:
        plain, marked, generates = _compile(self._source)
        given = {**self._special, **variables, "tools": tools, "documents": None}
        text = _write(plain, given, messages, prompt)
        if prompt:
            return {"text": text}
        mark = next(one for one in _NONCHARACTERS if one not in text)
        numbers = {id(message): number for number, message in enumerate(messages)}

        def call(kind: str, message: Any = None, *around: Any) -> str:
            if kind in "gh":
                return f"{mark}{kind}{mark}"
            number = numbers.get(id(message))
            # A loop inside the turn of a message looks at others; it does not end that turn.
            inside = any(id(one) in numbers for one in around)
            return "" if number is None or inside else f"{mark}{kind}{number}{mark}"

        pieces = re.split(
            f"{mark}([a-z])(\\d*){mark}", _write(marked, {**given, _CALL: call}, messages, False)
        )
        if "".join(pieces[::3]) != text:
            return (
                "it changes what it wrote before, so that nothing says where a message is: it may only take "
                "space off both ends of a block that has messages, by the filter trim ({{ block | trim }})"
            )
        turns, generated = _places(pieces)
        return {
            "text": text,
            "turns": turns,
            "generated": generated if generates else None,
            "header": "" if generates else _header(plain, given),
        }


def _header(template: Any, given: Mapping[str, Any]) -> str:
    """What a prompt has behind the user's message, without the beginning of a thought."""
    ask = [{"role": "user", "content": "a"}]
    without, prompt = (_write(template, {**given, "tools": None}, ask, one) for one in (False, True))
    begun = prompt[len(os.path.commonprefix([without, prompt])) :]
    return begun.partition("<think>")[0]


def _write(template: Any, given: Mapping[str, Any], messages: Any, prompt: bool) -> str:
    pieces, length = [], 0
    for piece in template.generate(**{**given, "messages": messages, "add_generation_prompt": prompt}):
        pieces.append(piece)
        length += len(piece)
        if length > _LONGEST:
            raise ValueError(f"it writes more than {_LONGEST:,} characters")
    return "".join(pieces)


@lru_cache(maxsize=1)
def _compile(source: str) -> tuple[Any, Any, bool]:
    """The template, its copy with marks, and whether it has `{% generation %}`."""
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    plain = _compile_jinja_template(source)  # transformers' sandbox, filters and functions
    environment = plain.environment
    tree = environment.parse(source)

    def mark(kind: str, *message: Any) -> Any:
        call = nodes.Call(nodes.Name(_CALL, "load"), [nodes.Const(kind), *message], [], None, None)
        return nodes.Output([call]).set_lineno(1)

    def mark_loops(node: Any, around: tuple[str, ...]) -> None:
        for inner in list(node.iter_child_nodes()):
            if not isinstance(inner, nodes.For) or not isinstance(inner.target, nodes.Name):
                mark_loops(inner, around)
                continue
            name = inner.target.name
            others = tuple(other for other in around if other != name)
            mark_loops(inner, (*others, name))
            given = [nodes.Name(one, "load") for one in (name, *others)]
            inner.body = [mark("b", *given), *inner.body, mark("e", *given)]

    mark_loops(tree, ())
    # The only extension that calls a block is the one of `generation`.
    blocks = [
        one for one in tree.find_all(nodes.CallBlock) if isinstance(one.call.node, nodes.ExtensionAttribute)
    ]
    for block in blocks:
        block.body = [mark("g"), *block.body, mark("h")]
    environment = environment.overlay()
    environment.filters = {**environment.filters, "trim": _trimmed}
    tree.set_environment(environment)
    return plain, environment.from_string(tree), bool(blocks)


def _trimmed(value: Any, chars: str | None = None) -> str:
    """Jinja's filter `trim`; what `_CALL` has written at the ends of a text stays."""
    pieces = _WRITTEN.split(str(value))  # text, what was written, its first character, text, …
    del pieces[2::3]
    texts = range(0, len(pieces), 2)
    for order, strip in ((texts, str.lstrip), (reversed(texts), str.rstrip)):
        for at in order:
            pieces[at] = strip(pieces[at], chars)
            if pieces[at]:
                break
    return "".join(pieces)


def _places(pieces: Sequence[str]) -> tuple[dict[int, Span], list[Span]]:
    """Where messages and generated parts are: pieces are text, kind, number, text, …"""
    turns: dict[int, Span] = {}
    generated: list[Span] = []
    current: int | None = None
    at, began, opened = len(pieces[0]), 0, 0
    for kind, number, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        if kind == "g":
            opened = at
        elif kind == "h":
            generated.append((opened, at))
        else:
            _keep(turns, current, (began, at))
            current, began = (int(number), at) if kind == "b" else (None, at)
        at += len(text)
    _keep(turns, current, (began, at))  # the loop was left
    return turns, generated


def _keep(turns: dict[int, Span], number: int | None, place: Span) -> None:
    """Of several loops, the one that writes most has the message."""
    if number is None:
        return
    start, end = turns.get(number, (0, 0))
    if place[1] - place[0] > end - start:
        turns[number] = place
