"""Mutates valid checkpoints and watches what the readers do with them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import guard, mutate
from tests.fuzz.targets import TARGETS, Folder, Target

FINDINGS = Path(__file__).parent / "findings"
#: Cases a guarded process does.
BATCH = 50


@dataclass(frozen=True)
class Case:
    """A valid folder and the files that are put in place of its own."""

    sample: str
    files: Folder


@dataclass(frozen=True)
class Finding:
    """A case and what it did."""

    target: str
    case: Case
    what: str

    def save(self, folder: Path = FINDINGS) -> Path:
        """Keep it; those that did the same to the same target are one file."""
        same = hashlib.sha256(f"{self.target} {_kind(self.what)}".encode()).hexdigest()[:10]
        path = folder / f"{self.target}-{same}.json"
        if not path.exists():
            packed = {
                name: base64.b64encode(lzma.compress(d)).decode() for name, d in self.case.files.items()
            }
            text = {"target": self.target, "what": self.what, "sample": self.case.sample, "files": packed}
            path.write_text(json.dumps(text, indent=1) + "\n")
        return path


def load(path: Path) -> Finding:
    """A kept finding."""
    data = json.loads(path.read_text())
    files = {name: lzma.decompress(base64.b64decode(text)) for name, text in data["files"].items()}
    return Finding(data["target"], Case(data["sample"], files), data["what"])


def _kind(what: str) -> str:
    """What is the same when the same thing happens with other numbers."""
    return what if "(" not in what else what.split(":")[0] + what[what.rindex("(") :]


def make(target: Target, samples: dict[str, Folder], pick: random.Random) -> Case:
    """A random case."""
    name = pick.choice(sorted(samples))
    sample = samples[name]
    may = [file for file in sorted(sample) if target.changed(file)]
    others = [sample[file] for file in may if len(sample[file]) < 1 << 20]
    chosen = pick.sample(may, min(len(may), pick.choice((1, 1, 1, 1, 2))))
    return Case(name, {file: mutate.change(pick, file, sample[file], others) for file in chosen})


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder in memory, if the machine has one."""
    with tempfile.TemporaryDirectory(
        prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as name:
        yield Path(name)


def run_cases(
    target: Target, samples: dict[str, Folder], cases: list[Case], place: Path
) -> list[tuple[Case, str]]:
    """Every case in a guarded process; returns those that did what they must not."""

    folder = place / "case"

    def prepare(number: int) -> None:
        case = cases[number]
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in {**samples[case.sample], **case.files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    def do(number: int) -> None:
        target.read(folder, cases[number].sample)

    return [(cases[v.case], v.what) for v in guard.run(range(len(cases)), prepare, do, place)]


def fuzz(
    names: list[str],
    seconds: float,
    seed: int,
    *,
    keep: Path = FINDINGS,
    batch: int = BATCH,
    say: Callable[[str], None] = print,
) -> list[Finding]:
    """Let the targets take turns until the time is over; findings are saved as they come."""
    end, found, done = time.monotonic() + seconds, {}, Counter[str]()
    samples = {name: TARGETS[name].samples() for name in names}
    with workplace() as place:
        for name in names:  # unchanged folders must be read, or nothing is tested
            whole = [Case(sample, {}) for sample in samples[name]]
            for case in whole:
                _check_valid(name, samples[name], case, place)
        spent = dict.fromkeys(names, 0.0)
        while (now := time.monotonic()) < end:
            name = min(names, key=lambda n: spent[n])  # each has its share of the time
            picks = [random.Random(f"{seed} {name} {done[name] + i}") for i in range(batch)]
            cases = [make(TARGETS[name], samples[name], pick) for pick in picks]
            for case, what in run_cases(TARGETS[name], samples[name], cases, place):
                finding = Finding(name, case, what)
                path = finding.save(keep)
                if path not in found:
                    found[path] = finding
                    say(f"{path.name}: {case.sample}, {', '.join(case.files)}: {what}")
            done[name] += len(cases)
            spent[name] += time.monotonic() - now
    say(", ".join(f"{name} {count:,}" for name, count in done.items()) + f" cases; {len(found)} findings")
    return list(found.values())


def _check_valid(name: str, samples: dict[str, Folder], case: Case, place: Path) -> None:
    folder = place / "valid"
    shutil.rmtree(folder, ignore_errors=True)
    for file, data in samples[case.sample].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    with contextlib.redirect_stdout(io.StringIO()):
        TARGETS[name].read(folder, case.sample)
    shutil.rmtree(folder)
