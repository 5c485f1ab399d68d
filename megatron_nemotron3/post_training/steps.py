"""Commands of several steps: each step is a command of its own, with one schedule and one model."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable

from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config


def require_positive(options: object, *names: str) -> None:
    """Raise ValueError for an option that is given and not above 0, or not below 2^31."""
    for name in names:
        if (value := getattr(options, name)) is not None and not 0 < value < 1 << 31:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give more than 0, and less than 2^31")


def require_schedule(options: object, config: Nemotron3Config) -> None:
    """Raise ValueError if --steps or --lr is missing and the model is no tiny one."""
    missing = [f"--{name}" for name in ("steps", "lr") if getattr(options, name) is None]
    if missing and "-tiny" not in config.name:
        raise ValueError(f"{config.title} has no default schedule: give {' and '.join(missing)}")


def length_step(config: Nemotron3Config, layout: ParallelLayout) -> int:
    """The number of tokens of which rows are a multiple: for TP and CP, in whole chunks of Mamba."""
    return math.lcm(config.mamba_chunk_size, 2 * layout.cp * layout.tp)


def with_own_name(config: Nemotron3Config) -> Nemotron3Config:
    """Return the model for a file, with a name of its own; that of a tiny one keeps its default schedule."""
    return config.but(name="own-tiny" if "-tiny" in config.name else "own")


def step(main: Callable[[list[str]], int], *arguments: object, prefix: str = "") -> int:
    """Run a command of the package by its entry point, after printing it as a shell takes it."""
    line = [str(word) for word in arguments]
    print(f"\n$ {prefix}nemotron3 {shlex.join(line)}", flush=True)
    return main(line)


class ProcessWatch:
    """Follows processes by a bar. An interrupt ends them at once: what they write is written whole, or not.

    Args:
        pattern: of a line of theirs: what is done, and of how much.
    """

    finished = True

    def __init__(self, bar: Bar, pattern: re.Pattern[str]) -> None:
        self.was_interrupted = False
        self._bar, self._pattern = bar, pattern

    def line(self, text: str) -> None:
        """Move the bar if the line says how much is done."""
        if found := self._pattern.match(text.rstrip()):
            self._bar.to(int(found[1]), int(found[2]))

    def interrupted(self) -> bool:
        """Keep that there was an interrupt; nothing is to be saved."""
        self.was_interrupted = True
        return False
