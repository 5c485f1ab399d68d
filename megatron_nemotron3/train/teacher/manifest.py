"""What a folder of stored logits holds, and the rows that a teacher was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import locate_one
from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.train.teacher.vocabulary import Vocabulary

MANIFEST = "manifest.json"
#: Bytes of a row's key.
KEY = 32
_FORMAT = "nemotron3-logits 1"


@dataclass(frozen=True)
class LogitsManifest:
    """What the rows of a folder are.

    k: tokens stored of each position; temperature: T, which divided the logits.
    length: tokens of a row; rows: of a part; samples: of the whole folder.
    source: what makes the rows (data, split, seed), so that a run that goes on writes the same ones.
    """

    k: int
    temperature: float
    length: int
    rows: int
    samples: int
    teacher: str
    vocabulary: Vocabulary
    source: dict[str, Any]

    @property
    def size(self) -> int:
        return self.samples * (KEY + 4 * self.length * (2 * self.k + 1))

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
        if not all(type(n) is int and n > 0 for n in (found.k, found.length, found.rows, found.samples)):
            raise ValueError("impossible sizes")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ValueError(f"{path}: not a manifest of {_FORMAT}: {problem}") from None
    return found


def require_parts(folder: Path, found: LogitsManifest, missing: Sequence[range]) -> None:
    """Raise ValueError if parts of a folder are missing."""
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(found.parts())} parts are missing or damaged, first "
            f"{part_path(folder, missing[0]).name}: run nemotron3 logits again, which goes on there"
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
    return TeacherRows(tuple(source["data"]), source["split"], source["tokenizer"], "cp" in source)
