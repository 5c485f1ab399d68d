"""Texts of several prompts on one terminal while they grow."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_nemotron3.generate.text import Passage, Tokenizer


class Screen:
    """Prints texts in the order of their prompts: the first unfinished one as it grows."""

    def __init__(
        self, prompts: Sequence[str], tokenizer: Tokenizer, stops: Sequence[str], live: bool
    ) -> None:
        self._prompts, self._live = prompts, live
        self.passages = [Passage(tokenizer, stops) for _ in prompts]
        self._ended = [False] * len(prompts)
        self._at, self._begun, self._at_line_start = 0, False, True

    def push(self, row: int, token: int) -> bool:
        """Take in a token; whether a stop text has come."""
        stopped = self.passages[row].push(token)
        self._ended[row] = self._ended[row] or stopped
        if self._live:
            self._print()
        return stopped

    def end(self) -> None:
        """All rows have ended."""
        for row, passage in enumerate(self.passages):
            passage.end()
            self._ended[row] = True

    def show(self) -> None:
        """Print what was not printed yet."""
        self._print()

    def _print(self) -> None:
        while self._at < len(self.passages):
            if not self._begun:
                self._begun = True
                if len(self._prompts) > 1:
                    self._write(f"--- prompt {self._at + 1}: {self._prompts[self._at][:60]!r}\n")
            self._write(self.passages[self._at].take())
            if not self._ended[self._at]:
                break
            if not self._at_line_start:
                self._write("\n")
            self._at, self._begun = self._at + 1, False
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        if text:
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            self._at_line_start = text.endswith("\n")
