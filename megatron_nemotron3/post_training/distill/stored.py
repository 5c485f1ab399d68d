"""Folders of a teacher's log-probabilities of k + m tokens (`topk`), by the rows of a data set.

    logits/manifest.json            what they are of: k, m, temperature, row length, vocabulary, teacher
    logits/part-00000000.npy        rows: key of the labels, ids [s, k + m], log-probabilities [s, k + m + 1]

A row is found by its labels, so training may read rows in any order, of any batch and layout, and a row that
is not stored is noticed. The last log-probability is that of all but the k most probable tokens. A part is
written whole or not at all, and the parts that are there say where to go on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nemotron3.common.files import atomic
from megatron_nemotron3.train.teacher.settings import (
    KEY,
    LogitsManifest,
    part_path,
    read_manifest,
    require_parts,
)


def row_type(manifest: LogitsManifest) -> np.dtype[Any]:
    """A row of a part."""
    s, n = manifest.length, manifest.k + manifest.drawn
    return np.dtype([("key", f"S{KEY}"), ("ids", "<i4", (s, n)), ("log_p", "<f4", (s, n + 1))])


def missing_parts(folder: Path, manifest: LogitsManifest) -> list[range]:
    """Parts that are not there or not whole."""
    return [part for part in manifest.parts() if _open(part_path(folder, part), manifest, len(part)) is None]


def write_part(folder: Path, manifest: LogitsManifest, part: range, rows: list[Any]) -> None:
    """Write a part: rows of (key, ids [s, k + m], log-probabilities [s, k + m + 1])."""
    table = np.empty(len(rows), row_type(manifest))
    for place, (key, ids, log_p) in enumerate(rows):
        table[place] = (key, ids, log_p)
    with atomic(part_path(folder, part)) as temporary, temporary.open("wb") as file:
        np.save(file, table)


def _open(path: Path, manifest: LogitsManifest, rows: int) -> Any:
    """A part, mapped; None if it is not there, of another form, or not whole."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return table if table.dtype == row_type(manifest) and len(table) == rows else None


def key_of(labels: Any, borders: Any = None) -> bytes:
    """Key of a row: its labels [s] and the borders of its documents, where it is packed."""
    digest = hashlib.blake2b(digest_size=16)
    for values in (labels, borders):
        if values is not None:
            digest.update(np.ascontiguousarray(values, dtype="<i8").tobytes())
    return digest.hexdigest().encode()


def mass_of(folder: Path) -> float:
    """The probability of the k most probable tokens, in the mean over all positions of a whole folder."""
    manifest = read_manifest(folder)
    tables = (_open(part_path(folder, part), manifest, len(part)) for part in manifest.parts())
    rests = [np.exp(table["log_p"][..., -1], dtype="f8").sum() for table in tables]
    return 1 - float(sum(rests)) / (manifest.samples * manifest.length)


class Reader:
    """Rows of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        require_parts(folder, self.manifest, missing_parts(folder, self.manifest))
        self._tables = [
            _open(part_path(folder, part), self.manifest, len(part)) for part in self.manifest.parts()
        ]
        #: Key -> part and row in it.
        self._places = {
            bytes(key): (number, row)
            for number, table in enumerate(self._tables)
            for row, key in enumerate(table["key"])
        }

    def row(self, labels: Any, borders: Any = None) -> tuple[Any, Any]:
        """Ids [s, k + m] and log-probabilities [s, k + m + 1] of the row with these labels [s]."""
        place = self._places.get(key_of(labels, borders))
        if place is None:
            raise ValueError(
                f"{self.folder} has no logits of a row of this run (labels begin {labels[:8].tolist()}): "
                f"train on what they were written for, at most {self.manifest.samples} samples of "
                f"{self.manifest.length} tokens of {self.manifest.source}"
            )
        found = self._tables[place[0]][place[1]]
        return np.array(found["ids"]), np.array(found["log_p"])
