"""The rows that a teacher was trained on, or that its logits were stored for. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoints.folders import locate_one
from megatron_nemotron3.common.files import json_outside
from megatron_nemotron3.train.teacher.manifest import is_stored, read_manifest

#: Longest manifest that is read, in bytes.
_LIMIT = 1 << 20


@dataclass(frozen=True)
class TeacherRows:
    """A training set: prefixes of data sets, or .jsonl conversations, and the folder of a tokenizer."""

    paths: tuple[str, ...]
    split: str
    tokenizer: str
    conversations: bool = False


def of_run(run: Path | None) -> TeacherRows | None:
    """The text that `nemotron3 train` prepared for a run; None if there is none, or more than one."""
    found = sorted(path.parent for path in run.glob("data/*/corpus.idx")) if run is not None else []
    if len(found) != 1 or not (found[0] / "manifest.json").is_file():
        return None
    place = found[0].resolve()
    split = json_outside(place / "manifest.json", limit=_LIMIT)["split"]
    return TeacherRows((str(place / "corpus"),), split, str(place / "tokenizer"))


def of_teacher(folder: str) -> TeacherRows | None:
    """The rows of a teacher's run, or of stored logits; None if they are not known."""
    if not is_stored(Path(folder)):
        return of_run(locate_one(Path(folder)).run)
    source = read_manifest(Path(folder)).source
    if not {"data", "split", "tokenizer"} <= source.keys():
        return None
    return TeacherRows(tuple(source["data"]), source["split"], source["tokenizer"], "cp" in source)
