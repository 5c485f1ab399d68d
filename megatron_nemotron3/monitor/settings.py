"""How often the monitors run, and how settings come from environment variables. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, TypeVar

VARIABLE = "NEMOTRON3_MONITOR"
#: Smallest default interval: from there on the monitors cost less than 1 % (benchmarks/monitor.py).
LEAST_DEFAULT = 10

T = TypeVar("T")


class EnvironmentSetting(Generic[T]):
    """A setting that a process receives in an environment variable, or a caller sets by a `with` block.

    The variable is read once, when `current` is first called. What changes it later has no effect. A `with`
    block applies to all threads, because autograd runs backward on a GPU in threads of its own.

    Args:
        name: the environment variable.
        parse: turns its text into a value; "" if it is not set. Raises ValueError for text without meaning.
    """

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name, self._parse = name, parse
        self._overrides: list[T] = []

    def read(self) -> T:
        """Value of the environment variable as it is now: for entry points, which refuse bad text early."""
        return self._parse(os.environ.get(self.name, ""))

    @cached_property
    def _of_process(self) -> T:
        return self.read()

    def current(self) -> T:
        """Value set by the innermost `using` block, else the one this process was started with."""
        return self._overrides[-1] if self._overrides else self._of_process

    @contextmanager
    def using(self, value: T) -> Iterator[None]:
        """Set the value inside a `with` block, whatever the environment says."""
        self._overrides.append(value)
        try:
            yield
        finally:
            self._overrides.pop()


def parse_interval(text: str) -> int:
    """A number of iterations, 0 for off.

    Raises:
        ValueError: anything else.
    """
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{VARIABLE}={text!r}: give the interval in iterations, or 0 for off")
    return int(text)


#: Value: the interval in iterations, 0 for off, None for the default.
_INTERVAL = EnvironmentSetting(VARIABLE, lambda text: parse_interval(text) if text else None)
#: Context manager: inside it monitors run every so many iterations (0: off, None: the default).
monitoring = _INTERVAL.using


def interval() -> int:
    """Iterations from one measurement to the next; 0 for off.

    The value of `monitoring` or NEMOTRON3_MONITOR counts first. Without one, a Megatron training script is
    monitored at its `--log-interval`, or at the first multiple of it that is at least `LEAST_DEFAULT`. A
    model built in any other pipeline is not monitored, because nothing there asks for a report.

    Raises:
        ValueError: NEMOTRON3_MONITOR is not a number.
    """
    given = _INTERVAL.current()
    if given is not None:
        return given
    options = megatron_options()
    if options is None:
        return 0
    log_interval = int(options.log_interval)
    return log_interval * -(-LEAST_DEFAULT // log_interval)


def megatron_options() -> Any:
    """The parsed options of a Megatron training script; None in any other process."""
    # Looked up, not imported: a training script has imported it and parsed its options before it builds.
    global_vars = sys.modules.get("megatron.training.global_vars")
    try:
        return global_vars.get_args() if global_vars is not None else None
    except AssertionError:  # no options were parsed
        return None


def asked_for() -> bool:
    """Whether the user asked for monitors by name, so that a reason for their absence must be printed."""
    return bool(_INTERVAL.current())
