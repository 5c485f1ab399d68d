"""What a folder of stored logits (`post_training/distill/stored.py`) is of. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import record
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
        """Bytes of all parts but for their headers."""
        return self.samples * (KEY + 4 * self.length * (2 * self.k + 1))

    def parts(self) -> list[range]:
        """Samples of each part."""
        return [
            range(first, min(first + self.rows, self.samples)) for first in range(0, self.samples, self.rows)
        ]

    def write(self, folder: Path) -> None:
        """Write it to a folder, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        record.write(folder / MANIFEST, {"format": _FORMAT, **asdict(self)})


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
