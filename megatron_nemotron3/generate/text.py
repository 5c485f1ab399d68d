"""A tokenizer folder, and text that appears token by token. Needs tokenizers, and no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"
#: What an unfinished UTF-8 character is decoded to, once or once a byte.
_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 3
#: Tokens that are decoded again with each new one, at least.
_WINDOW = 16


class Tokenizer:
    """A Hugging Face tokenizer folder, as `nemotron3 train` and released models have it.

    Args:
        folder: with tokenizer.json; tokenizer_config.json, generation_config.json and config.json say which
            tokens end a text, if they are there.

    Raises:
        ValueError: there is no tokenizer.json, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        path = folder / TOKENIZER
        if not path.is_file():
            raise ValueError(f"{folder}: there is no {TOKENIZER} in it: give --tokenizer DIR")
        try:
            self._tokenizer = Fast.from_file(str(path))
        except Exception as problem:  # the library raises nothing more precise
            raise ValueError(f"{path}: no tokenizer: {problem}") from None
        self.folder = folder
        #: Ids 0 to vocab_size - 1.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        #: Ids that end a text; the first separates documents.
        self.stop: tuple[int, ...] = tuple(dict.fromkeys(self._stop()))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; names of special tokens in it are those tokens."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _stop(self) -> list[int]:
        token = read_object(self.folder / "tokenizer_config.json").get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        found = [self._tokenizer.token_to_id(name)] if isinstance(name, str) else []
        for file in ("generation_config.json", "config.json"):
            ids = read_object(self.folder / file).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
        return [i for i in found if type(i) is int and 0 <= i < self.vocab_size]


class Stream:
    """Tokens -> text as soon as it is certain: an unfinished character waits for the rest of its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        #: Characters of the decoded ids that were handed out.
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that has become certain with one more token; often empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        certain = text
        for _ in range(_MOST_UNFINISHED):
            certain = certain.removesuffix(_UNFINISHED)
        new, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if certain == text and len(self._ids) >= 2 * _WINDOW:
            # The text ends with a character: what comes does not depend on what it began with.
            self._ids = self._ids[-_WINDOW:]
            self._shown = len(self._tokenizer.decode(self._ids))
        return new

    def end(self) -> str:
        """What was still waiting."""
        new = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._shown = [], 0
        return new


class Passage:
    """The text of one row, and where a stop text ends it.

    Args:
        stops: texts that end it; they are no part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = Stream(tokenizer), stops
        self._longest = max(map(len, stops), default=0)
        self._taken = 0
        #: All of it so far.
        self.text = ""
        #: The stop text that ended it.
        self.stopped_by: str | None = None

    def push(self, token: int) -> bool:
        """Add a token; whether a stop text has come."""
        self._add(self._stream.push(token))
        return self.stopped_by is not None

    def end(self) -> None:
        """No more tokens come."""
        if self.stopped_by is None:
            self._add(self._stream.end())
        self._longest = 0

    def take(self) -> str:
        """Text that was not taken yet and that no stop text can reach any more."""
        end = len(self.text)
        if self.stopped_by is None and self._longest:
            end -= self._longest - 1
        new = self.text[self._taken : max(end, self._taken)]
        self._taken += len(new)
        return new

    def _add(self, new: str) -> None:
        start = max(0, len(self.text) - self._longest + 1)
        self.text += new
        found = [(at, s) for s in self._stops if (at := self.text.find(s, start)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
