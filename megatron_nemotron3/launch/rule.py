"""What a rule is. The rules themselves are in `rules_*.py`, and `rules.py` applies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_nemotron3.launch.launch import Launch

#: Files of megatron-core that many rules come from.
ARGUMENTS = "megatron/training/arguments.py"
CONFIG = "megatron/core/transformer/transformer_config.py"

#: A note is of something harmless. In this order they are listed.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Rule:
    """A condition under which a launch fails, or behaves differently than expected."""

    name: str
    violated: Callable[[Launch], object]
    #: The numbers and the cure. Called only when violated.
    message: Callable[[Launch], str]
    #: Where the restriction comes from: a file of megatron-core 0.19, an issue, a report.
    source: str
    severity: Severity = "error"


@dataclass(frozen=True)
class Violation:
    """A violated rule with its message."""

    rule: str
    severity: Severity
    message: str
    source: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} [{self.rule}; {self.source}]"


def divisors(whole: int, limit: int | None = None) -> str:
    """The divisors of `whole` up to `limit`, for a message: "1, 2, 4"."""
    return ", ".join(str(n) for n in range(1, min(whole, limit or whole) + 1) if whole % n == 0)
