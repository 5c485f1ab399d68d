"""How long each test file takes: which are light enough for `make quick`, and which must start first.

    OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 4 --dist loadfile -m "not full" --junitxml=build/tests.xml
    python -m tests.support.durations build/tests.xml      # write tests/durations.txt from it

tests/durations.txt has a line for each file that is not light.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
FILE = TESTS / "durations.txt"
#: `make quick` leaves out files that took longer than this, in seconds.
LIGHT = 1.0
_HEAD = "# seconds  file (written by python -m tests.support.durations; make quick leaves them out)"


def read() -> dict[str, float]:
    """Seconds of every listed file, by its path below tests/."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {name: float(seconds) for seconds, name in (line.split() for line in lines if line[:1] != "#")}


def measured(report: Path) -> dict[str, float]:
    """Seconds of every file in a JUnit report of pytest."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
        seconds[name] += float(case.get("time", 0))
    return dict(seconds)


def write(seconds: dict[str, float]) -> None:
    """Write tests/durations.txt, the longest file first."""
    listed = sorted(((s, name) for name, s in seconds.items() if s > LIGHT), reverse=True)
    FILE.write_text("\n".join([_HEAD, *(f"{s:8.1f}  {name}" for s, name in listed)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(measured(Path(sys.argv[1])))
