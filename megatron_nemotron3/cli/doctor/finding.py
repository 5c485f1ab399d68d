"""Findings of the doctor: a sentence, a level and a cure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: "error": training will fail; the exit code is 1. "warning": training works with a loss or a risk. "absent":
#: an optional package or device is missing.
Level = Literal["ok", "absent", "warning", "error"]
MARKS: dict[Level, str] = {"ok": "ok", "absent": "-", "warning": "warning", "error": "ERROR"}


@dataclass(frozen=True)
class DoctorFinding:
    """One result of a check.

    subject: a package, "gpu", a kernel or "step".
    cure: what to do, often a command; "" if there is nothing to do.
    """

    subject: str
    level: Level
    message: str
    cure: str = ""


def render(sections: Sequence[tuple[str, Sequence[DoctorFinding]]]) -> str:
    """Text for a terminal, section by section; each cure is below its finding."""
    lines: list[str] = []
    for title, findings in sections:
        width = max((len(finding.subject) for finding in findings), default=0)
        lines += ["", title] if lines else [title]
        for f in findings:
            lines.append(f"  {MARKS[f.level]:<7} {f.subject:<{width}}  {f.message}".rstrip())
            lines += [f"  {'':<7} {'':<{width}}  -> {f.cure}"] if f.cure else []
    return "\n".join(lines)
