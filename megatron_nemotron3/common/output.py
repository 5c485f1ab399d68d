"""What commands print: lines or one JSON document, tables, progress bars, means with intervals.

    with result(options.json):
        say(f"weights      {n:,} tensors", tensors=n)

prints the line, or at the end of the block `{"tensors": n}`. Outside of such a block `say` prints.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_nemotron3.common.files import printable

#: Seconds between two plain lines.
INTERVAL = 10.0
BYTES = "B"
_facts: ContextVar[dict[str, Any] | None] = ContextVar("facts", default=None)


def print_json(data: Any) -> None:
    """Print a JSON document, with null for NaN and infinities, and text for paths."""
    print(json.dumps(_plain(data), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def result(as_json: bool) -> Iterator[None]:
    """Print what `say` records in this block as one JSON document, if the block ends without an exception.

    Until then stdout is stderr, for whatever else is printed.
    """
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr), _recorded() as facts:
        yield
    print_json(facts)


@contextlib.contextmanager
def part() -> Iterator[dict[str, Any]]:
    """Record the facts of this block separately, for a caller that puts them into a larger result."""
    if _facts.get() is None:
        yield {}
        return
    with _recorded() as facts:
        yield facts


@contextlib.contextmanager
def _recorded() -> Iterator[dict[str, Any]]:
    facts: dict[str, Any] = {}
    token = _facts.set(facts)
    try:
        yield facts
    finally:
        _facts.reset(token)


def say(line: str | None = None, /, **facts: Any) -> None:
    """Print a line, escaped, or record facts for the JSON document: a list goes on the list of its name."""
    found = _facts.get()
    if found is None:
        if line is not None:
            print(printable(line, but="\n\t"), flush=True)
        return
    for name, value in facts.items():
        if isinstance(value, list):
            found.setdefault(name, []).extend(value)
        else:
            found[name] = value


def table(rows: Sequence[Sequence[object]], align: str = "") -> list[str]:
    """Return a line of text for each row, its cells two blanks apart."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = align or "l" * len(widths)
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides)
        ).rstrip()
        for row in cells
    ]


def count(number: int, name: str) -> str:
    """Return "1 file" or "1,200 files"; `name`: in the singular."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def size_text(length: float) -> str:
    """Return "1.5 GB" for a number of bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if length >= size:
            return f"{length / size:,.1f} {unit}"
    return f"{length:.0f} bytes"


def drawn_on(stream: TextIO) -> bool:
    """Whether bars are drawn there: it is a terminal, and tqdm is installed."""
    return stream.isatty() and importlib.util.find_spec("tqdm") is not None


@dataclass(eq=False)
class Bar:
    """Progress of one piece of work, on a terminal as a bar, elsewhere as a line every ten seconds."""

    #: A short name in front of the bar, and of a line.
    what: str
    #: What is counted, as "tokens"; `BYTES` for bytes.
    unit: str
    #: None if it is not known yet.
    total: int | None = None
    _: KW_ONLY
    #: What an earlier process did. It does not count in the rate.
    begun: int = 0
    #: Leave the finished bar on the terminal.
    keep: bool = False
    #: None: stderr.
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        self._stream = sys.stderr if self.stream is None else self.stream
        self._started = self._last = time.monotonic()
        self._done = self.begun
        self._bar: Any = None
        if drawn_on(self._stream):
            # For a terminal that states a width of 0 tqdm draws nothing.
            columns = shutil.get_terminal_size((0, 0)).columns
            self._bar = _tqdm()(
                desc=self.what,
                total=self.total,
                initial=self.begun,
                unit=self.unit if self.unit == BYTES else f" {self.unit}",
                unit_scale=self.unit == BYTES,
                file=self._stream,
                leave=self.keep,
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
        self.to(self._done + count)

    def to(self, done: int, total: int | None = None, *, begun: int | None = None, note: str = "") -> None:
        """Show that `done` of the whole is done; a `total` and a `begun` replace the earlier ones."""
        self._done = done
        self.total = self.total if total is None else total
        self.begun = self.begun if begun is None else begun
        if self._bar is not None:
            self._bar.total, self._bar.initial = self.total, self.begun
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            if self._bar.n < self.begun:
                self._bar.n = self._bar.last_print_n = self.begun
            self._bar.update(done - self._bar.n)
        elif (now := time.monotonic()) - self._last >= INTERVAL:
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
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self) -> str:
        def amount(count: float) -> str:
            digits = 1 if count < 10 and count % 1 else 0
            return size_text(count) if self.unit == BYTES else f"{count:,.{digits}f} {self.unit}"

        rate = (self._done - self.begun) / self.seconds
        text = amount(self._done)
        if self.total is not None and self.unit != "%":
            done = text if self.unit == BYTES else f"{self._done:,}"
            text = f"{done} of {amount(self.total)}"
        text = f"{self.what}: {text}, {amount(rate)}/s"
        if self.total is None or not rate:
            return text
        return text + f", {(self.total - self._done) / rate:,.0f} s left"


def _tqdm() -> Any:
    """tqdm without its thread and its semaphore, which processes that are forked here would inherit."""
    import threading

    from tqdm import tqdm

    class Plain(tqdm):
        monitor_interval = 0

    Plain.set_lock(threading.RLock())
    return Plain


@dataclass(frozen=True)
class Interval:
    """A mean, its confidence interval, and p of "the true mean is 0" (two-sided).

    One value has an infinite interval and p = 1.
    """

    mean: float
    half_width: float
    n: int
    p: float

    def __format__(self, spec: str) -> str:
        """Format both numbers, as in f"{interval:+.3f}": "-0.021 ± 0.011"; one value has no ±."""
        if self.n < 2:
            return f"{self.mean:{spec}} (n = 1)"
        return f"{self.mean:{spec}} ± {self.half_width:{spec.replace('+', '')}}"


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Interval:
    """Interval of the mean of a[i] - b[i], as of two runs of a seed: seeds differ from each other far more.

    Raises:
        ValueError: the numbers of values differ; or as `interval`.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are not pairs: give as many of each")
    return interval([x - y for x, y in zip(a, b, strict=True)], level)


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Interval of the mean of independent values, by Student's t: three have 4.30 standard errors at 95 %.

    Raises:
        ValueError: no values, one that is not finite, or a level outside 0 to 1.
        ModuleNotFoundError: scipy is not installed.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"an interval needs finite values, not {list(values)}")
    if not 0 < level < 1:
        raise ValueError(f"level {level}: use one between 0 and 1")
    n = len(values)
    if n == 1:
        return Interval(float(values[0]), math.inf, 1, 1.0)
    import statistics  # both take longer to import than most commands run

    from scipy import stats

    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(n)
    half_width = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    return Interval(mean, half_width, n, p)
