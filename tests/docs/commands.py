"""What a command of a card needs in this repository: files, modules, tests, targets, subcommands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("benchmarks", "docs", "examples", "megatron_nemotron3", "tests")
CONTROL = {"&&", "||", "|", ";"}


def missing(command: str, root: Path, subcommands: set[str]) -> list[str]:
    """What the command names and `root` does not have, in words; empty: all is there."""
    found: list[str] = []
    for words in _calls(command):
        found += _missing(words, root, subcommands)
    return found


def _calls(command: str) -> Iterator[list[str]]:
    """The words of each call, without variables in front."""
    for line in command.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word in CONTROL:
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z_0-9]+=.*", word):
                words.append(word)


def _missing(words: list[str], root: Path, subcommands: set[str]) -> Iterator[str]:
    program = words[0]
    if program == "make" and not re.search(rf"^{words[1]}:", (root / "Makefile").read_text(), re.M):
        yield f"make has no target {words[1]}"
    if program == "nemotron3" and not {words[1], " ".join(words[1:3])} & subcommands:
        yield f"nemotron3 has no command {words[1]}"
    if program == "python" and words[1:2] == ["-m"] and words[2].split(".")[0] in FOLDERS:
        module = root / words[2].replace(".", "/")
        if not module.with_suffix(".py").is_file() and not (module / "__main__.py").is_file():
            yield f"no module {words[2]}"
    for word in words:
        path, _, test = word.partition("::")
        if path.split("/")[0] not in FOLDERS or "/" not in path:
            continue
        if not (root / path).exists():
            yield f"no file {path}"
        elif test and not re.search(rf"^def {test}\(", (root / path).read_text(), re.M):
            yield f"no test {test} in {path}"
