"""Peak memory of a command and of all processes it starts.

    python benchmarks/process_tree.py COMMAND…

prints what the command prints, and the memory that its processes take together (`proportional`).

Resident memory (RSS) counts anonymous pages and pages of mapped files, but not the page cache of files that
are read and written by system calls. The kernel keeps a high-water mark per process (VmHWM), which is polled
until the process ends. The sum over all processes is an upper bound, because the processes need not peak at
the same time, and forked ones share pages. There is no such mark for anonymous memory (RssAnon), so its
result is the largest sum that was polled. It counts pages that forked processes share once for each; the
kernel's proportional size (PSS) divides them, but takes milliseconds per process to read.
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

#: Seconds between two polls.
INTERVAL = 0.02


@dataclass(frozen=True)
class Usage:
    """Result of a command, its time in seconds, and its memory in bytes."""

    returncode: int
    output: str
    seconds: float
    rss: int
    anonymous: int
    processes: int
    #: Largest sum of proportional sizes, of anonymous and shared memory, not of files, that two polls in a
    #: row reached: a single one counts too much if a process starts or ends meanwhile. 0: not polled.
    proportional: int = 0


def watch(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    proportional: bool = False,
    interval: float | None = None,
) -> Usage:
    """Run a command and poll the memory of its processes.

    Args:
        environment: the whole environment; default: that of this process.
        proportional: whether to poll proportional sizes, too, and therefore less often.
        interval: seconds between two polls; default: INTERVAL, and 0.5 with proportional sizes.
    """
    if interval is None:
        interval = 0.5 if proportional else INTERVAL
    marks: dict[int, int] = {}
    anonymous = shared = last = 0
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
            now = parts = 0
            for pid in tree(process.pid):
                found = proc_bytes(f"{pid}/status")
                marks[pid] = max(marks.get(pid, 0), found.get("VmHWM", 0))
                now += found.get("RssAnon", 0)
                if proportional:
                    rollup = proc_bytes(f"{pid}/smaps_rollup")
                    parts += rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0)
            anonymous, shared, last = max(anonymous, now), max(shared, min(last, parts)), parts
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(interval)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Usage(process.returncode, text, seconds, sum(marks.values()), anonymous, len(marks), shared)


def idle() -> Usage:
    """Measure an interpreter that imports nothing."""
    return watch([sys.executable, "-c", "import time; time.sleep(0.3)"])


def tree(pid: int) -> list[int]:
    """A process and those of its descendants that are alive."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def proc_bytes(name: str) -> dict[str, int]:
    """The sizes in a file of /proc such as "meminfo" or "self/status", in bytes; {} if it is gone.

    Linux only.
    """
    try:
        lines = Path("/proc", name).read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}


def main() -> int:
    """Run a command, print its memory, and return its exit status."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(f"usage: process_tree.py COMMAND…\n\n{__doc__}")
        return 0 if command else 2
    usage = watch(command, proportional=True)
    print(usage.output, end="")
    print(f"{usage.processes} processes, {usage.seconds:.0f} s, {usage.proportional / 2**30:.2f} GiB at once")
    return usage.returncode


if __name__ == "__main__":
    sys.exit(main())
