"""From what a student is distilled, and how. Standard library only.

    NEMOTRON3_DISTILL=teacher=runs/big
    NEMOTRON3_DISTILL=kind=reverse-kl,temperature=2,weight=0.9,tp=2,teacher=runs/big
    NEMOTRON3_DISTILL not set                                      off

`teacher=` comes last, because a path may contain anything. `nemotron3 run` takes the same as two options,
`--nemotron3-teacher DIR` and `--nemotron3-distill kind=…,temperature=…`, also among the script's own.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.monitor.settings import EnvironmentSetting
from megatron_nemotron3.precision.settings import split_option

VARIABLE = "NEMOTRON3_DISTILL"
#: Options of `nemotron3 run`; they may stand among the script's own.
TEACHER, HOW = "--nemotron3-teacher", "--nemotron3-distill"
#: Divergences of teacher and student (divergence.py).
KINDS = ("kl", "reverse-kl", "tv", "js")
#: Losses of a teacher with another tokenizer (xtoken/loss.py), the default first.
ACROSS = ("p-kl", "h-kl")
#: Sizes of the teacher's layout that may differ from the student's.
SIZES = ("tp", "cp", "ep", "etp", "pp")
_WORDS = ("kind", "projection")
_NUMBERS = ("temperature", "weight")
_LAST = "teacher="


@dataclass(frozen=True)
class Distillation:
    """The loss of a token is weight * T ** 2 * divergence + (1 - weight) * cross-entropy.

    Args:
        teacher: folder of a checkpoint, or of logits that `nemotron3 logits` stored.
        kind: of `KINDS`; with a projection of `ACROSS`.
        temperature: T, which divides the logits of both. T ** 2 keeps the size of gradients.
        weight: from above 0 to 1.
        sizes: of the teacher's layout, by names of `SIZES`; what is missing is the student's.
        projection: file of `nemotron3 xtoken` for a teacher with another tokenizer.

    Raises:
        ValueError: a value is unknown or out of range.
    """

    teacher: str
    kind: str = "kl"
    temperature: float = 1.0
    weight: float = 1.0
    sizes: tuple[tuple[str, int], ...] = ()
    projection: str = ""

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ValueError("no teacher: give the folder of its checkpoint, or of stored logits")
        kinds = ACROSS if self.projection else KINDS
        if self.kind not in kinds:
            hint = "; those with projection=FILE are " + ", ".join(ACROSS) if kinds is KINDS else ""
            raise ValueError(f"kind={self.kind}: use one of {', '.join(kinds)}{hint}")
        if "," in self.projection:
            raise ValueError(f"projection={self.projection}: give a path without a comma")
        if self.projection and self.sizes:
            said = ", ".join(f"{name}={size}" for name, size in self.sizes)
            raise ValueError(f"a teacher with another tokenizer has the student's layout: drop {said}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature:g}: give a positive number")
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight={self.weight:g}: give a number above 0, up to 1")
        for name, size in self.sizes:
            if size < 1:
                raise ValueError(f"{name}={size}: give 1 or more")

    @property
    def how(self) -> str:
        """The value of `HOW` with this meaning."""
        words = [f"kind={self.kind}", *(f"{name}={getattr(self, name)!r}" for name in _NUMBERS)]
        words += [f"projection={self.projection}"] * bool(self.projection)
        return ",".join([*words, *(f"{name}={size}" for name, size in self.sizes)])

    def text(self) -> str:
        """The value of NEMOTRON3_DISTILL with this meaning."""
        return f"{self.how},{_LAST}{self.teacher}"


def read(teacher: str, how: str = "") -> Distillation:
    """Parse the two options.

    Raises:
        ValueError: a word has no meaning, is given twice, or its value is out of range.
    """
    given: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in how.split(","))):
        name, _, value = word.partition("=")
        if name in given:
            raise ValueError(f"{HOW} {how}: {name} is given twice")
        if name not in (*_WORDS, *_NUMBERS, *SIZES):
            raise ValueError(f"{HOW} {how}: {word!r}: use {'=, '.join((*_WORDS, *_NUMBERS, *SIZES))}=")
        try:
            given[name] = value if name in _WORDS else float(value) if name in _NUMBERS else int(value)
        except ValueError:
            raise ValueError(f"{HOW} {how}: {word!r}: give a number") from None
    sizes = tuple((name, given.pop(name)) for name in SIZES if name in given)
    if given.get("projection"):
        given["projection"] = os.path.abspath(given["projection"])
        given.setdefault("kind", ACROSS[0])
    try:
        return Distillation(teacher, **given, sizes=sizes)
    except ValueError as problem:
        raise ValueError(f"{HOW} {how}: {problem}" if how else str(problem)) from None


def parse(text: str) -> Distillation | None:
    """Parse a value of NEMOTRON3_DISTILL; None for off.

    Raises:
        ValueError: as `read`, or there is no teacher.
    """
    if text in ("", "0"):
        return None
    start = 0 if text.startswith(_LAST) else text.find(f",{_LAST}") + 1
    if not text[start:].startswith(_LAST):
        raise ValueError(f"{VARIABLE}={text!r}: end with teacher=FOLDER")
    return read(text[start + len(_LAST) :], text[:start].rstrip(","))


def teaching(how: Distillation | None) -> AbstractContextManager[None]:
    """Inside the block models that Megatron builds learn from a teacher (`attach.distilling`); None: not."""
    if how is None:
        return nullcontext()
    from megatron_nemotron3.distill.attach import distilling

    return distilling(how)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the two options of `nemotron3 run`."""
    among = "may stand among ARGS, too"
    parser.add_argument(
        TEACHER, metavar="DIR", help=f"learn from the model of a checkpoint, or from stored logits; {among}"
    )
    parser.add_argument(HOW, metavar="HOW", help=f"as kind=kl,temperature=2,weight=0.9,tp=2; {among}")


def split_options(
    words: Sequence[str], options: argparse.Namespace
) -> tuple[list[str], tuple[str | None, str | None]]:
    """Take both options out of a script's words; the values are those, or of `add_options`."""
    rest, teacher = split_option(words, TEACHER)
    rest, how = split_option(rest, HOW)
    given = (options.nemotron3_teacher, options.nemotron3_distill)
    return rest, (given[0] if teacher is None else teacher, given[1] if how is None else how)


_DISTILLATION = EnvironmentSetting(VARIABLE, parse)
#: Value of NEMOTRON3_DISTILL as it is now, for entry points. Raises ValueError as `parse` does.
in_environment = _DISTILLATION.read
