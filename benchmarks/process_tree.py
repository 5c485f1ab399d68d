"""Peak memory of a command and of everything it starts.

Resident memory (RSS) counts anonymous pages and pages of mapped files; the page cache of files that are read
and written by system calls is not in it. The kernel keeps each process's high-water mark (VmHWM), which is
read until the process ends; the marks of all processes are added up, though they need not fall together and
forked processes share pages, so the sum is an upper bound. Anonymous memory (RssAnon) has no mark: it is the
largest sum seen.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Seconds between two looks.
INTERVAL = 0.02


@dataclass(frozen=True)
class Usage:
    """What a command did and used: seconds, and bytes."""

    returncode: int
    output: str
    seconds: float
    rss: int
    anonymous: int
    processes: int


def watch(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Usage:
    """Run a command to its end and watch it.

    Args:
        environment: all of it; default: this process's own.
    """
    marks: dict[int, int] = {}
    anonymous = 0
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=cwd,
        )
        while process.poll() is None:
            now = 0
            for pid in tree(process.pid):
                found = _fields(pid)
                marks[pid] = max(marks.get(pid, 0), found.get("VmHWM", 0))
                now += found.get("RssAnon", 0)
            anonymous = max(anonymous, now)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERVAL)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Usage(process.returncode, text, seconds, sum(marks.values()), anonymous, len(marks))


def idle() -> Usage:
    """An interpreter that has imported nothing."""
    return watch([sys.executable, "-c", "import time; time.sleep(0.3)"])


def tree(pid: int) -> list[int]:
    """A process and its descendants, as far as they live."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _fields(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    split = (line.split() for line in lines)
    return {s[0].rstrip(":"): int(s[1]) * 1024 for s in split if len(s) == 3 and s[2] == "kB"}
