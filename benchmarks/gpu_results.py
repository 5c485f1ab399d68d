"""The results file of gpu.py: JSON lines. The file is replaced as a whole whenever a line is added.

A reader therefore finds a valid file, whenever the program that writes it was killed. Two kinds of lines:

    {"kind": "run", "device": "NVIDIA H200", "small": false, "date": …, "versions": …, "command": …}
    {"kind": "stage", "stage": "tests", "status": "ok", "seconds": 71.2, "error": "", "rows": […], "date": …}

A stage belongs to the last run before it. If a stage has several lines, the last one counts. Standard library
only, so that the tables can be made anywhere.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import read_outside, write_text

#: ok: it ended. skipped: something that it needs is not here. failed: an error, a failed test or a signal.
#: memory: out of memory. timeout: it was killed at its limit. interrupted: it was killed because the call
#: ended, and is run again by the next one.
STATUSES = ("ok", "skipped", "failed", "memory", "timeout", "interrupted")
DONE = STATUSES[:-1]
#: Bytes of the largest file that is read.
LIMIT = 64 * 2**20

Record = dict[str, Any]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


class Results:
    """The lines of one file.

    Raises:
        ValueError: the file was not written by gpu.py.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Record] = _read(path) if path.exists() else []

    def add(self, record: Record) -> None:
        """Add a line with the date, and write the file."""
        self.lines.append({**record, "date": now()})
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def runs(self) -> list[Record]:
        """The calls of gpu.py, the first one first."""
        return [line for line in self.lines if line["kind"] == "run"]

    def stages(self) -> dict[str, Record]:
        """Name -> the last line of each stage, in the order in which they first ran."""
        return {line["stage"]: line for line in self.lines if line["kind"] == "stage"}

    def done(self, name: str) -> bool:
        """Whether a stage has a result, good or bad."""
        found = self.stages().get(name)
        return found is not None and found["status"] in DONE

    def rows(self, prefix: str, kind: str | None = None) -> Iterator[tuple[str, Record]]:
        """(stage, row) of the stages whose name begins with `prefix`."""
        for name, stage in self.stages().items():
            if name.startswith(prefix):
                yield from ((name, row) for row in stage["rows"] if kind in (None, row.get("kind")))


def _read(path: Path) -> list[Record]:
    found: list[Record] = []
    for number, text in enumerate(read_outside(path, limit=LIMIT).decode("utf-8", "replace").splitlines(), 1):
        try:
            line = json.loads(text)
            good = line["kind"] == "run" and "device" in line
            good = good or (line["status"] in STATUSES and isinstance(line["rows"], list) and line["stage"])
        except (ValueError, TypeError, KeyError):
            good = False
        if not good:
            raise ValueError(f"{path}, line {number}, is not a result of gpu.py: give another file")
        found.append(line)
    if found and found[0]["kind"] != "run":
        raise ValueError(f"{path} does not begin with a run of gpu.py: give another file")
    return found


def whole_lines(path: Path) -> list[Record]:
    """The rows that a stage has written so far; a line that was cut off is left out."""
    rows = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
