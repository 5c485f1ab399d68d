"""A tokenizer folder, and text that appears while its tokens arrive."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_file, read_json
from megatron_nemotron3.checkpoints.tokenizer_file import LIMIT, require_bounded

TOKENIZER = "tokenizer.json"
#: Replacement character that an incomplete UTF-8 character decodes to, once or once per byte.
_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 3
#: Tokens that are decoded again with each new one, at least.
_WINDOW = 16


class Tokenizer:
    """A Hugging Face tokenizer folder, as `nemotron3 train` writes it and released models have it.

    Args:
        folder: contains tokenizer.json. If present, tokenizer_config.json, generation_config.json and
            config.json say which tokens end a text.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = folder / TOKENIZER
        if not path.is_file():
            raise ValueError(f"{folder}: there is no {TOKENIZER} in it: give --tokenizer DIR")
        require_bounded(path)
        self._tokenizer = FastTokenizer.from_buffer(read_file(path, LIMIT))
        self.folder = folder
        #: Ids are 0 to vocab_size - 1.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        #: Ids that end a text; the first one separates documents.
        self.stop: tuple[int, ...] = tuple(dict.fromkeys(self._stop_ids()))

    def encode(self, text: str, *, whole: bool = True) -> list[int]:
        """Ids of a text; names of special tokens in it become those tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=whole).ids
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; `special`: with the names of special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def _stop_ids(self) -> list[int]:
        token = read_json_object(self.folder / "tokenizer_config.json").get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        found = [self._tokenizer.token_to_id(name)] if isinstance(name, str) else []
        for file in ("generation_config.json", "config.json"):
            ids = read_json_object(self.folder / file).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
        return [i for i in found if type(i) is int and 0 <= i < self.vocab_size]


class Detokenizer:
    """Incremental detokenization: an incomplete character is held back until its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        #: Characters of the decoded ids that have been returned.
        self._returned = 0

    def push(self, token: int) -> str:
        """Add a token and return the text that has become final; often empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        final = text
        for _ in range(_MAX_INCOMPLETE):
            final = final.removesuffix(_INCOMPLETE)
        new, self._returned = final[self._returned :], max(self._returned, len(final))
        if final == text and len(self._ids) >= 2 * _WINDOW:
            # The text ends with a complete character: later text does not depend on its beginning.
            self._ids = self._ids[-_WINDOW:]
            self._returned = len(self._tokenizer.decode(self._ids))
        return new

    def end(self) -> str:
        new = self._tokenizer.decode(self._ids)[self._returned :]
        self._ids, self._returned = [], 0
        return new


class OutputText:
    """The text of one row, up to the first of the texts that end it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), stops
        self._longest_stop = max(map(len, stops), default=0)
        self._taken = 0
        #: The whole text so far.
        self.text = ""
        #: The stop text that ended it.
        self.stopped_by: str | None = None
        #: Whether it is complete.
        self.ended = False

    def push(self, token: int) -> bool:
        self._add(self._detokenizer.push(token))
        return self.ended

    def end(self) -> None:
        if not self.ended:
            self._add(self._detokenizer.end())
        self.ended = True

    def take(self) -> str:
        """Text that has not been taken yet and cannot become part of a stop text."""
        end = len(self.text)
        if not self.ended and self._longest_stop:
            end -= self._longest_stop - 1
        new = self.text[self._taken : max(end, self._taken)]
        self._taken += len(new)
        return new

    def _add(self, new: str) -> None:
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        found = [(at, s) for s in self._stops if (at := self.text.find(s, start)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text, self.ended = self.text[:at], True


class OutputStream:
    """Prints texts in the order of their prompts, `live` while tokens arrive, else only in `print_rest`."""

    def __init__(
        self, prompts: Sequence[str], tokenizer: Tokenizer, stops: Sequence[str], live: bool
    ) -> None:
        self._prompts, self._live = prompts, live
        self.outputs = [OutputText(tokenizer, stops) for _ in prompts]
        self._row, self._row_begun, self._at_line_start = 0, False, True

    def push(self, row: int, token: int) -> bool:
        stopped = self.outputs[row].push(token)
        if self._live:
            self.print_rest()
        return stopped

    def end(self) -> None:
        for output in self.outputs:
            output.end()

    def print_rest(self) -> None:
        while self._row < len(self.outputs):
            if not self._row_begun:
                self._row_begun = True
                if len(self._prompts) > 1:
                    self._write(f"--- prompt {self._row + 1}: {self._prompts[self._row][:60]!r}\n")
            self._write(self.outputs[self._row].take())
            if not self.outputs[self._row].ended:
                break
            if not self._at_line_start:
                self._write("\n")
            self._row, self._row_begun = self._row + 1, False

    def _write(self, text: str) -> None:
        if text:
            write(text)
            self._at_line_start = text.endswith("\n")


def write(text: str) -> None:
    """Write to stdout at once; what its encoding lacks becomes question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is none."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}
