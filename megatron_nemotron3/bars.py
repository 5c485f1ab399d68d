"""Progress bars with the time left and the rate: tqdm on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

#: Seconds between two plain lines.
INTERVAL = 10.0
BYTES = "B"


def size_text(length: float) -> str:
    """Return "1.5 GB" for a number of bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if length >= size:
            return f"{length / size:,.1f} {unit}"
    return f"{length:.0f} bytes"


def drawn_on(stream: TextIO) -> bool:
    """Whether bars are drawn there: it is a terminal, and tqdm is installed."""
    return stream.isatty() and importlib.util.find_spec("tqdm") is not None


class Bar:
    """Progress of one piece of work, on a terminal as a bar, elsewhere as a line every ten seconds.

    Args:
        what: a short name in front of the bar.
        unit: what is counted, as "tokens"; `BYTES` for bytes.
        total: None if it is not known yet.
        begun: what was done before, by an earlier process. It does not count in the rate.
        lines: print lines where there is no bar.
        keep: leave the finished bar on the terminal.
        stream: default: stderr.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None = None,
        *,
        begun: int = 0,
        lines: bool = True,
        keep: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._unit, self._total, self._begun, self._lines = unit, total, begun, lines
        self._started = self._last = time.monotonic()
        self._done = begun
        self._bar: Any = None
        if drawn_on(self._stream):
            # For a terminal that states a width of 0 tqdm draws nothing.
            columns = shutil.get_terminal_size((0, 0)).columns
            self._bar = _tqdm()(
                desc=what,
                total=total,
                initial=begun,
                unit=unit if unit == BYTES else f" {unit}",
                unit_scale=unit == BYTES,
                file=self._stream,
                leave=keep,
                dynamic_ncols=bool(columns),
                ncols=None if columns else 80,
                nrows=None if columns else 24,
            )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """Since the bar was made; not 0."""
        return max(time.monotonic() - self._started, 1e-6)

    def add(self, count: int) -> None:
        """Count what was done since the last call."""
        self.to(self._done + count)

    def to(self, done: int, total: int | None = None, *, begun: int | None = None, note: str = "") -> None:
        """Show that `done` of the whole is done; what is not None replaces what was given before."""
        self._done = done
        self._total = self._total if total is None else total
        self._begun = self._begun if begun is None else begun
        if self._bar is not None:
            self._bar.total, self._bar.initial = self._total, self._begun
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            if self._bar.n < self._begun:
                self._bar.n = self._bar.last_print_n = self._begun
            self._bar.update(done - self._bar.n)
        elif self._lines and (now := time.monotonic()) - self._last >= INTERVAL:
            self._last = now
            print(self._line(), file=self._stream, flush=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something else is printed."""
        if self._bar is not None:
            self._bar.clear()
        yield
        if self._bar is not None:
            sys.stdout.flush()
            self._bar.refresh()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self) -> str:
        def amount(count: float) -> str:
            return size_text(count) if self._unit == BYTES else f"{count:,.0f} {self._unit}"

        rate = (self._done - self._begun) / self.seconds
        text = amount(self._done) if self._total is None else f"{amount(self._done)} of {amount(self._total)}"
        text += f", {amount(rate)}/s"
        if self._total is None or not rate:
            return text
        return text + f", {(self._total - self._done) / rate:,.0f} s left"


def _tqdm() -> Any:
    """tqdm without its thread and its semaphore, which processes that are forked here would inherit."""
    import threading

    from tqdm import tqdm

    class Plain(tqdm):
        monitor_interval = 0

    Plain.set_lock(threading.RLock())
    return Plain
