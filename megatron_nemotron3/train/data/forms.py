"""Conversations as people have them: files of rows, and the messages of a row.

`FORMS` has a function for each form. It takes the fields that it knows out of a row, and returns messages as
OpenAI's with two changes: arguments of tool calls are objects, and no content is null.
"""

from __future__ import annotations

import io
import json
import os
import re
from codecs import BOM_UTF8, getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any, BinaryIO, NamedTuple

from megatron_nemotron3.common.files import open_outside
from megatron_nemotron3.common.limits import LimitedChild, LimitError
from megatron_nemotron3.common.output import count

Message = dict[str, Any]
Fields = dict[str, Any]

#: Bytes of a line, and messages of a row.
LINE, _MESSAGES = 16 << 20, 10_000
#: Bytes of a JSON list, and of Parquet's rows, that are read at a time.
_BLOCK = 1 << 20
#: Bytes of memory and seconds to read Parquet's next rows.
_MEMORY, _SECONDS = 4 << 30, 60
#: Remarks that name something of a file, at most.
_REMARKS = 20
_PARQUET = b"PAR1"
#: A data set of the Hugging Face Hub: OWNER/NAME, and perhaps its part.
_DATA_SET = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
#: A role in small letters -> the template's.
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_KNOWN = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "weight"}
_PAIRS = [("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output")]


class RowLine(NamedTuple):
    """A row as a line of JSON; `place` is `file:line`, for messages. A longer one than `LINE` may be cut."""

    place: str
    #: First byte of the line in its file; -1 if it is no line there.
    offset: int
    line: bytes


@dataclass
class Findings:
    """What is said once about the rows of a file."""

    forms: Counter[str] = field(default_factory=Counter)
    #: What is to be said -> number of conversations, and the first case.
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, remark: str, case: str, *, named: bool = False) -> None:
        """Keep a remark; `named`: it names something of the file, so that there may be any number."""
        if named and remark not in self.remarks and len(self.remarks) >= _REMARKS:
            remark = "there is more of this kind"
        times, first = self.remarks.get(remark, (0, case))
        self.remarks[remark] = times + 1, first

    def lines(self, path: str) -> list[str]:
        """One line for the forms, and one for each remark."""
        forms = ", ".join(f"{count(rows, 'row')} of {FORMS[name].title}" for name, rows in self.forms.items())
        said = [f"{remark} ({count(n, 'time')}, first {case})" for remark, (n, case) in self.remarks.items()]
        return [f"{path}: {forms}", *(f"{path}: {one}" for one in said)]


def read_rows(path: str | os.PathLike[str]) -> Iterator[RowLine]:
    """Rows of JSON lines, a JSON list, Parquet, or a data set of the Hub."""
    name = os.fspath(path)
    found = _DATA_SET.fullmatch(name)
    here = any(map(os.path.lexists, (name, os.path.dirname(name))))
    if found and not here and not name.endswith((".json", ".jsonl", ".parquet")):
        yield from _data_set(name, found[1], split=found[2] or "train")
        return
    with open_outside(name) as file:
        beginning = file.read(1 << 16)
        if beginning.startswith(_PARQUET):
            yield from _data_set(name, "parquet", split="train", data_files=[name])
            return
        file.seek(0)
        if beginning.removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
            yield from _list(name, file)
            return
        offset, number = 0, 1
        while line := file.readline(LINE + 1):
            if line.strip():
                yield RowLine(f"{name}:{number}", offset, line)
            offset, number = offset + len(line), number + 1


def _list(name: str, file: BinaryIO) -> Iterator[RowLine]:
    """Elements of a JSON list, one at a time in memory."""
    decoder, blank = json.JSONDecoder(), re.compile(r"[ \t\n\r]*")
    utf8, text, at, number = getincrementaldecoder("utf-8-sig")(), "", 0, 1

    def more() -> bool:
        """Read as much again as is kept, so that a long row is not tried often; False at the end."""
        nonlocal text, at
        data = file.read(max(_BLOCK, len(text) - at))
        try:
            text, at = text[at:] + utf8.decode(data, not data), 0
        except UnicodeDecodeError as problem:
            raise ValueError(f"{name}: not JSON in UTF-8: {problem.reason}") from None
        return bool(data)

    def skip(end: int) -> str:
        """Go to the first character from `end` on that is not blank, and return it."""
        nonlocal at, number
        while True:
            end = blank.match(text, end).end()  # type: ignore[union-attr]
            at, number = end, number + text.count("\n", at, end)
            if at < len(text) or not more():
                return text[at : at + 1]
            end = 0

    skip(0)
    sign = skip(at + 1)
    while sign != "]":
        place = f"{name}:{number}"
        try:
            value, end = decoder.raw_decode(text, at)
            line = json.dumps(value).encode() + b"\n"
            del value
        except (ValueError, RecursionError) as problem:
            wrong = getattr(problem, "pos", 0)
            # Of a row that goes on behind `text`, a string, a literal or a number is cut.
            if len(text) - wrong < 16 or "Unterminated" in str(problem):
                if len(text) - at > LINE:
                    yield RowLine(place, -1, text[at : at + LINE + 1].encode())
                    return
                if more():
                    continue
            where, reason = number + text.count("\n", at, wrong), getattr(problem, "msg", problem)
            raise ValueError(f"{name}:{where}: not JSON: {reason}") from None
        yield RowLine(place, -1, line)
        sign = skip(end)
        if sign == ",":
            sign = skip(at + 1)
        elif sign != "]":
            raise ValueError(f"{place}: not JSON: no comma or ] behind the row that begins here")
    if skip(at + 1):
        raise ValueError(f"{name}:{number}: there is more behind the list: give one, or JSON lines")


def _data_set(name: str, *what: str, **how: Any) -> Iterator[RowLine]:
    """Rows that `datasets` reads in a child with limits: a page of Parquet holds more than its file."""
    try:
        import datasets
        import pyarrow
    except ImportError:
        raise ValueError(f"{name}: Parquet and data sets of the Hub need `pip install datasets`") from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ValueError(f"{name}: datasets {datasets.__version__} may run code of a data set: install 4")
    rows: Any = None

    def answer(_: bytes) -> bytes:
        """The next rows as lines, or what is wrong as a line of a text; nothing at the end."""
        nonlocal rows
        try:
            if rows is None:
                pyarrow.set_cpu_count(1)  # each thread takes address space
                rows = iter(datasets.load_dataset(*what, streaming=True, **how))
            lines = io.BytesIO()
            while lines.tell() < _BLOCK and (row := next(rows, None)) is not None:
                lines.write(json.dumps(_without_null(row), default=_date).encode()[: LINE + 1] + b"\n")
            return lines.getvalue()
        except MemoryError:
            raise
        except Exception as problem:  # of the network, of the library, of the file
            return json.dumps(" ".join(str(problem).split())).encode()

    child, number = LimitedChild(answer, memory=_MEMORY, seconds=_SECONDS), 0
    try:
        while lines := child.ask(b""):
            if lines.startswith(b'"'):
                raise ValueError(f"{name}: datasets: {json.loads(lines)}")
            for line in lines.splitlines(keepends=True):
                number += 1
                yield RowLine(f"{name}:{number}", -1, line)
    except LimitError as problem:
        cure = "write it with smaller row groups, or as JSON lines"
        raise ValueError(f"{name}: reading the rows behind row {number:,} {problem}: {cure}") from None
    finally:
        child.close()


def _without_null(value: Any) -> Any:
    """A row without fields that are null: Parquet has all fields of a column in each row."""
    if isinstance(value, dict):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list) else value


def _date(value: Any) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is neither a text nor a number")


def messages_of(row: Fields, form: str, place: str, findings: Findings) -> tuple[list[Message], Any, Fields]:
    """Messages, tools and template variables of a row; `form`: of `FORMS`, "": the first that fits."""
    fitting = [name for name, one in FORMS.items() if form in ("", name) and one.fits(row)]
    if not fitting:
        wanted = "a form of docs/training.md" if not form else f"the fields of --format {form}"
        fields = ", ".join(map(repr, row)) or "none"
        raise ValueError(f'give an object with a list "messages", or {wanted}; its fields: {fields[:200]}')
    name, rest = fitting[0], dict(row)
    tools, variables = rest.pop("tools", None), rest.pop("chat_template_kwargs", None)
    messages = FORMS[name].read(rest)
    if len(messages) > _MESSAGES:
        raise ValueError(f"it has {len(messages):,} messages, more than {_MESSAGES:,}: cut the conversation")
    if not messages:
        raise ValueError('give an object with a list "messages" that is not empty')
    messages = [_message(one, number) for number, one in enumerate(messages, 1)]
    findings.forms[name] += 1
    for unused in rest:
        findings.add(f"field {unused!r:.60} is not used", place, named=True)
    for unknown in {key for one in messages for key in one} - _KNOWN:
        remark = f"field {unknown!r:.60} of a message is only given to the chat template"
        findings.add(remark, place, named=True)
    for role in {one["role"] for one in messages} - {*_ROLES.values()}:
        remark = "an unknown role is only given to the chat template, and not trained"
        findings.add(remark, f"{role!r:.60} in {place}")
    tools = _json(tools, "tools", list) or None
    return messages, tools, _json(variables, "chat_template_kwargs", dict) or {}


def _json(value: Any, what: str, kind: type) -> Any:
    """A value, or one that is written as a text of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{what} is not JSON: {problem}") from None
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{what}: give {'an object' if kind is dict else 'a list'}")
    return value


def _message(given: Any, number: int) -> Message:
    """A message with the names and types of OpenAI's."""
    if isinstance(given, dict) and "from" in given and "role" not in given:
        given = {**given, "role": given["from"], "content": given.get("value")}
        del given["from"]
        given.pop("value", None)
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError('every message is an object with "role" and "content" (or "from" and "value")')
    message = {name: value for name, value in given.items() if value is not None and value != []}
    message["role"] = _ROLES.get(message["role"].lower(), message["role"])
    if message["role"] == "function_call":  # ShareGPT's
        call = _json(message.pop("content", None), f"message {number}: function_call", dict)
        message.update(role="assistant", tool_calls=[call])
    if "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    for name in _REASONING[1:]:
        if name in message and "reasoning_content" not in message:
            message["reasoning_content"] = message.pop(name)
    if not isinstance(message.get("reasoning_content", ""), str):
        raise ValueError(f"message {number}: reasoning_content is no text")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise ValueError(f"message {number}: tool_calls is no list")
        message["tool_calls"] = [_call(one, number) for one in calls]
    if "content" not in message and not {"tool_calls", "reasoning_content"} & message.keys():
        raise ValueError(f'message {number} has no "content"')
    content = message.setdefault("content", "")
    parts = content if isinstance(content, list) else []
    if not isinstance(content, (str, list)) or not all(isinstance(one, (str, dict)) for one in parts):
        raise ValueError(f"message {number}: content is neither a text nor a list of parts")
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"message {number}: weight {message['weight']!r:.60}: give 0 or 1")
    return message


def _call(given: Any, number: int) -> Fields:
    """A tool call whose arguments are an object."""
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'message {number}: a tool call is {{"function": {{"name": …, "arguments": …}}}}')
    arguments = _json(function.get("arguments"), f"message {number}: arguments of a tool call", dict) or {}
    outer = given if "function" in given else {"type": "function"}
    return {**outer, "function": {**function, "arguments": arguments}}


def text_of(content: Any) -> str:
    """A content as one text. Raises ValueError at a part that is no text."""
    if isinstance(content, str):
        return content
    texts = [one if isinstance(one, str) else one.get("text") for one in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, dict) else None
            raise ValueError(f"a part of type {kind!r:.60}: a model of text reads only parts of type 'text'")
    return "".join(texts)


def _with_system(row: Fields, messages: list[Message]) -> list[Message]:
    """Messages behind the row's system text, if they do not begin with one of their own."""
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if "system" in (first.get("role"), first.get("from")) or not (text := row.pop("system", None)):
        return messages
    return [{"role": "system", "content": text}, *messages]


def _messages(row: Fields) -> list[Message]:
    return _with_system(row, row.pop("messages"))


def _sharegpt(row: Fields) -> list[Message]:
    return _with_system(row, row.pop("conversations"))


def _alpaca(row: Fields) -> list[Message]:
    """Instruction and input are two lines of one message; `history`: pairs of texts before them."""
    told = []
    for asked, answered in row.pop("history", None) or ():
        told += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    asked = [text for text in (row.pop("instruction"), row.pop("input", None)) if text]
    if not all(isinstance(text, str) for text in asked):
        raise ValueError("instruction and input: give texts")
    user = {"role": "user", "content": "\n".join(asked)}
    return _with_system(row, [*told, user, {"role": "assistant", "content": row.pop("output")}])


def _pair(row: Fields) -> list[Message]:
    """A text or a list of messages each; of the prompt none is trained."""
    names = next(names for names in _PAIRS if names[0] in row and names[1] in row)
    prompt, completion = (row.pop(name) for name in names)
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(completion, list):
        completion = [{"role": "assistant", "content": completion}]
    untrained = [{**one, "weight": 0} if isinstance(one, dict) else one for one in prompt]
    return _with_system(row, [*untrained, *completion])


class Form(NamedTuple):
    """title: for messages. fits: whether a row has the fields. read: its messages; takes known fields out."""

    title: str
    fits: Callable[[Fields], bool]
    read: Callable[[Fields], list[Message]]


#: Value of --format -> form; of several that fit the first is taken.
FORMS = {
    "messages": Form("OpenAI's messages", lambda row: isinstance(row.get("messages"), list), _messages),
    "sharegpt": Form("ShareGPT", lambda row: isinstance(row.get("conversations"), list), _sharegpt),
    "alpaca": Form("Alpaca", lambda row: row.keys() >= {"instruction", "output"}, _alpaca),
    "prompt": Form(
        "prompt and completion", lambda row: any(row.keys() >= {*names} for names in _PAIRS), _pair
    ),
}
