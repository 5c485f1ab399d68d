"""The code blocks of README and docs/, and how a test runs them.

Every ```bash and ```python block of README.md and of the pages written by hand runs as it stands (`make
test-full`; `make test` parses it), unless a comment on the line above says otherwise:

    <!-- not run: REASON -->    it cannot run here
    <!-- full -->               it takes long: it runs in bash, not in a forked process

The blocks of a page share one folder, from top to bottom. The folder looks like a checkout in which
`runs/demo` has been trained for two steps.
"""

from __future__ import annotations

import re
import shlex
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>bash|sh|python)\n(?P<text>.*?)^```$", re.M | re.S
)

#: Stand-ins in front of the PATH. `nemotron3` is this checkout's and trains for two steps; launchers of other
#: machines print what they were told.
NEMOTRON3 = """\
import re, sys
from megatron_nemotron3.cli import main
words = sys.argv[1:]
end = words.index("--") if "--" in words else len(words)
if words[:1] == ["train"]:
    ours = re.sub(r" --steps \\d+", "", " ".join(words[:end]))
    words[:end] = [*ours.split(" "), "--steps", "2"]
if __name__ == "__main__":  # certify's ranks import the main module
    sys.exit(main(words))
"""
_PRINT = "import sys\nprint(*sys.argv[1:])\n"


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    line: int
    language: str
    text: str
    #: Of the comment above it: "", "full" or "not run: REASON".
    mark: str

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return not self.mark.startswith("not run")

    def nemotron3_commands(self) -> list[list[str]] | None:
        """The words after each `nemotron3`; None if the block has anything that only a shell understands."""
        lines = [line.partition(" #")[0] for line in self.text.replace("\\\n", "").splitlines()]
        lines = [line for line in lines if line.strip()]
        if not all(line.startswith("nemotron3 ") and not set("$&|;<>()`*?~") & set(line) for line in lines):
            return None
        return [shlex.split(line)[1:] for line in lines]


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page below the root of the repository, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        yield Block(page, line, found["language"], found["text"], found["mark"] or "")


def write_stand_ins(folder: Path) -> None:
    """Write the programs that stand in front of the PATH."""
    for name, text in {"nemotron3": NEMOTRON3, "torchrun": _PRINT, "sbatch": _PRINT}.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
