"""How the commands of this package print sizes and progress."""

from __future__ import annotations

import sys
import time

from megatron_nemotron3.convert.job import Progress


def size_text(length: float) -> str:
    """Return "1.5 GB" for a number of bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if length >= size:
            return f"{length / size:,.1f} {unit}"
    return f"{length:.0f} bytes"


class ProgressLine:
    """A progress line: rewritten on a terminal, otherwise printed every ten seconds."""

    def __init__(self) -> None:
        self._shown, self._last = False, time.monotonic()

    def progress(self, at: Progress) -> None:
        """Show the progress of the job."""
        terminal = sys.stderr.isatty()
        if not terminal and time.monotonic() - self._last < 10:
            return
        self._last = time.monotonic()
        left = at.seconds_left
        text = f"{size_text(at.done)} of {size_text(at.total)}, {size_text(at.rate)}/s" + (
            "" if left is None else f", {left:,.0f} s left"
        )
        print(
            f"\r{text:<70}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True
        )
        self._shown = terminal

    def end(self) -> None:
        """End the line."""
        if self._shown:
            print(file=sys.stderr)
        self._shown = False
