"""Where a stage of gpu.py runs, and where its rows go. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


class Skipped(Exception):
    """A stage cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Setting:
    """Where a stage runs, and where its rows go.

    rows: a file; None: rows are printed. results: of earlier stages. output: where rows are printed; None:
    standard output.
    """

    device: str
    small: bool
    rows: Path | None = None
    results: Path | None = None
    output: TextIO | None = None

    def emit(self, kind: str, **fields: Any) -> None:
        """Write a row."""
        self.write({"kind": kind, **fields})

    def write(self, row: dict[str, Any]) -> None:
        """Write a row as it is; one with "error" says why the stage ended."""
        text = json.dumps(row)
        if self.rows is None:
            print(text, file=self.output, flush=True)
            return
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
