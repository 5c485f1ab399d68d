"""From what a student is distilled, and how.

    NEMOTRON3_DISTILL=teacher=runs/big
    NEMOTRON3_DISTILL=kind=reverse-kl,temperature=2,weight=0.9,teacher=runs/big
    NEMOTRON3_DISTILL not set                                      off

`teacher=` comes last, because a path may contain anything; several teachers have a line each. `nemotron3 run`
takes the same as two options, `--nemotron3-teacher DIR` and `--nemotron3-distill kind=…,temperature=…`, also
among the script's own; they are repeated for several teachers.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import locate_one
from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.common.switches import DISTILL, EnvironmentSetting
from megatron_nemotron3.train.teacher.vocabulary import Vocabulary

#: Options of `nemotron3 run`; they may stand among the script's own.
TEACHER, HOW = "--nemotron3-teacher", "--nemotron3-distill"
#: Divergences of teacher and student (`post_training/distill/divergences.py`).
KINDS = ("kl", "reverse-kl", "tv", "js")
#: Losses of a teacher with another tokenizer (post_training/xtoken/loss.py), the default first.
ACROSS = ("p-kl", "h-kl")
#: Sizes of a layout, which a teacher shares with the student.
_SIZES = ("tp", "cp", "ep", "etp", "pp")
_WORDS = ("kind", "projection")
_NUMBERS = ("temperature", "weight")
_LAST = "teacher="


@dataclass(frozen=True)
class Distillation:
    """One teacher: to a token's loss it adds weight * T ** 2 * divergence.

    Cross-entropy has the weight 1 - sum of teacher weights.

    Args:
        teacher: folder of a checkpoint, or of logits that `nemotron3 distill logits` stored.
        kind: of `KINDS`; with a projection of `ACROSS`.
        temperature: T, which divides the logits of both. T ** 2 keeps the size of gradients.
        weight: from above 0 to 1.
        projection: file of `nemotron3 distill projection` for a teacher with another tokenizer.

    Raises:
        ValueError: a value is unknown or out of range.
    """

    teacher: str
    kind: str = "kl"
    temperature: float = 1.0
    weight: float = 1.0
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
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature:g}: give a positive number")
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight={self.weight:g}: give a number above 0, up to 1")

    @property
    def how(self) -> str:
        words = [f"kind={self.kind}", *(f"{name}={getattr(self, name)!r}" for name in _NUMBERS)]
        words += [f"projection={self.projection}"] * bool(self.projection)
        return ",".join(words)


#: The teachers of a run; () for none.
Distillations = tuple[Distillation, ...]
#: OptionNames of the two options, and their values.
OptionNames = tuple[str, str]
OptionValues = tuple[tuple[str, ...], tuple[str, ...]]


def read(
    teachers: Sequence[str], settings: Sequence[str] = (), names: OptionNames = (TEACHER, HOW)
) -> Distillations:
    """Parse the values of the two options; `settings`: one for each teacher, or one for all, or none."""
    if settings and not teachers:
        raise ValueError(f"{names[1]} goes with {names[0]}: give both")
    if len(settings) not in (0, 1, len(teachers)):
        raise ValueError(
            f"{names[1]} is given {len(settings)} times for {len(teachers)} teachers: give it once for each "
            f"{names[0]}, in the same order, or once for all"
        )
    each = list(settings) * (len(teachers) if len(settings) == 1 else 1) or [""] * len(teachers)
    pairs = zip(teachers, each, strict=True)
    found = tuple(_read(one, how, 1 / len(teachers), names[1]) for one, how in pairs)
    rest_of(found)
    return found


def rest_of(distillations: Distillations) -> float:
    """The weight of cross-entropy: 1 - sum of teacher weights."""
    rest = 1 - math.fsum(one.weight for one in distillations)
    if rest < -1e-9:
        total = " + ".join(f"{one.weight:g}" for one in distillations)
        raise ValueError(
            f"weights of the teachers {total} are above 1: give less, cross-entropy has the rest"
        )
    return rest if rest > 1e-9 else 0.0


def _read(teacher: str, how: str, weight: float, option: str) -> Distillation:
    """One teacher; `weight` if none is given, `option` in messages."""
    given: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in how.split(","))):
        name, _, value = word.partition("=")
        if name in given:
            raise ValueError(f"{option} {how}: {name} is given twice")
        if name in _SIZES:
            raise ValueError(
                f"{option} {how}: {word}: a teacher runs in the student's layout: leave {name} out, or "
                f"store its logits in that layout first (nemotron3 distill logits {teacher} --{name} N)"
            )
        if name not in (known := (*_WORDS, *_NUMBERS)):
            raise ValueError(f"{option} {how}: {word!r}: use {'=, '.join(known)}={hint(name, known)}")
        try:
            given[name] = value if name in _WORDS else float(value)
        except ValueError:
            raise ValueError(f"{option} {how}: {word!r}: give a number") from None
    if given.get("projection"):
        given["projection"] = os.path.abspath(given["projection"])
        given.setdefault("kind", ACROSS[0])
    given.setdefault("weight", weight)
    try:
        return Distillation(teacher, **given)
    except ValueError as problem:
        raise ValueError(f"{option} {how}: {problem}" if how else str(problem)) from None


def parse(text: str) -> Distillations:
    """Parse a value of NEMOTRON3_DISTILL; () for off."""
    if text in ("", "0"):
        return ()
    teachers, settings = [], []
    for line in text.splitlines():
        start = 0 if line.startswith(_LAST) else line.find(f",{_LAST}") + 1
        if not line[start:].startswith(_LAST):
            raise ValueError(f"{DISTILL}={text!r}: end with teacher=FOLDER")
        teachers.append(line[start + len(_LAST) :])
        settings.append(line[:start].rstrip(","))
    return read(teachers, settings)


def text_of(distillations: Distillations) -> str:
    """The value of NEMOTRON3_DISTILL with this meaning."""
    return "\n".join(f"{one.how},{_LAST}{one.teacher}" for one in distillations)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the two options of `nemotron3 run`."""
    for name, metavar, what in (
        (TEACHER, "DIR", "teacher checkpoint, or stored logits"),
        (HOW, "SETTINGS", "distillation settings, such as kind=kl,temperature=2,weight=0.9"),
    ):
        what += "; may be repeated; may also be among ARGS"
        parser.add_argument(name, metavar=metavar, help=what, action="append", default=[])


#: Value of NEMOTRON3_DISTILL as it is now, for entry points. Raises ValueError as `parse` does.
in_environment = EnvironmentSetting[Distillations](DISTILL, parse).read


MANIFEST = "manifest.json"
#: Bytes of a row's key.
KEY = 32
_FORMAT = "nemotron3-logits 2"


@dataclass(frozen=True)
class LogitsManifest:
    """What the rows of a folder are.

    k: most probable tokens of each position; drawn: tokens drawn from the others; temperature: T, which
    divided the logits.
    length: tokens of a row; rows: of a part; samples: of the whole folder.
    source: what makes the rows (data, split, seed), so that a run that goes on writes the same ones.
    """

    k: int
    drawn: int
    temperature: float
    length: int
    rows: int
    samples: int
    teacher: str
    vocabulary: Vocabulary
    source: dict[str, Any]

    @property
    def size(self) -> int:
        return self.samples * (KEY + 4 * self.length * (2 * (self.k + self.drawn) + 1))

    def parts(self) -> list[range]:
        return [
            range(first, min(first + self.rows, self.samples)) for first in range(0, self.samples, self.rows)
        ]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MANIFEST, {"format": _FORMAT, **asdict(self)})


def is_stored(folder: Path) -> bool:
    """Whether a folder holds stored logits."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> LogitsManifest:
    """Read the manifest of a folder."""
    path = folder / MANIFEST
    try:
        data = record.read(path)
        if data.pop("format") != _FORMAT:
            raise ValueError("another format")
        found = LogitsManifest(**{**data, "vocabulary": Vocabulary(**data["vocabulary"])})
        sizes = (found.k, found.drawn + 1, found.length, found.rows, found.samples)
        if not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError("impossible sizes")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ValueError(f"{path}: not a manifest of {_FORMAT}: {problem}") from None
    return found


def require_parts(folder: Path, found: LogitsManifest, missing: Sequence[range]) -> None:
    """Raise ValueError if parts of a folder are missing."""
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(found.parts())} parts are missing or damaged, first "
            f"{part_path(folder, missing[0]).name}: run nemotron3 distill logits again, which goes on there"
        )


def part_path(folder: Path, part: range) -> Path:
    """File of a part, by its first sample."""
    return folder / f"part-{part.start:08d}.npy"


@dataclass(frozen=True)
class TeacherRows:
    """A training set: prefixes of data sets, or .jsonl conversations, and the folder of a tokenizer."""

    paths: tuple[str, ...]
    split: str
    tokenizer: str
    conversations: bool = False
    #: `train.data.conversations.Reading` as a text.
    reading: str = ""


def rows_of_run(run: Path | None) -> TeacherRows | None:
    """The text that `nemotron3 train` prepared for a run; None if there is none, or more than one."""
    found = sorted(path.parent for path in run.glob("data/*/corpus.idx")) if run is not None else []
    if len(found) != 1 or not (found[0] / MANIFEST).is_file():
        return None
    place = found[0].resolve()
    split = record.read(place / MANIFEST)["split"]
    return TeacherRows((str(place / "corpus"),), split, str(place / "tokenizer"))


def rows_of_teacher(folder: str) -> TeacherRows | None:
    """The rows of a teacher's run, or of stored logits; None if they are not known."""
    if not is_stored(Path(folder)):
        return rows_of_run(locate_one(Path(folder)).run)
    source = read_manifest(Path(folder)).source
    if not {"data", "split", "tokenizer"} <= source.keys():
        return None
    paths, reading = tuple(source["data"]), source.get("reading", "")
    return TeacherRows(paths, source["split"], source["tokenizer"], "cp" in source, reading)
