"""Interrupt `nemotron3 train` at random moments, and check what it says against what is on disk.

    python -m tests.support.interrupted_runs --signal SIGINT --ranks 2 --moments 30 --seed 0 [--async]

Each moment is a run of a tiny model with a checkpoint every 3 steps, in its own process. The moment is drawn
over the whole run: imports, data, model, steps, saves, evaluations, the end. Prints one line per moment.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_nemotron3.checkpoints import folders, resume
from megatron_nemotron3.checkpoints.structure import check_structure
from megatron_nemotron3.common.processes import descendants
from megatron_nemotron3.train import log

ROOT = Path(__file__).parent.parent.parent
STEPS = 24
#: Seconds that every process may still live once its parent is dead.
LONGEST = 10.0


@dataclass(frozen=True)
class Kind:
    """How a run saves, and what interrupts it."""

    signum: signal.Signals = signal.SIGINT
    ranks: int = 1
    asynchronous: bool = False


@dataclass(frozen=True)
class Outcome:
    """What was left of a run that was interrupted."""

    #: Where the run was: its last step that was logged (0: none), and how much had been printed.
    last: int
    saved: int | None
    status: int | None
    said: str
    problems: tuple[str, ...]


def command(folder: Path, kind: Kind) -> list[str]:
    """`nemotron3 train` on a few kilobytes of text; each step is logged."""
    text = folder.parent / "text"
    if not text.exists():
        text.mkdir()
        for name in "abcd":
            (text / f"{name}.txt").write_text(f"The quick brown fox {name} jumps over the lazy dog. " * 200)
    words = ["train", "nano", "--tiny", "--device", "cpu", "--output", str(folder), "--text", str(text)]
    words += ["--seq-length", "32", "--micro-batch-size", "1", "--steps", str(STEPS)]
    words += ["--dp", "2"] if kind.ranks == 2 else []
    megatron = ["--eval-iters", "1", "--eval-interval", "4", "--save-interval", "3", "--log-interval", "1"]
    megatron += ["--async-save", "--use-persistent-ckpt-worker"] if kind.asynchronous else []
    return [sys.executable, "-m", "megatron_nemotron3", *words, "--", *megatron]


def interrupt(folder: Path, kind: Kind, step: int, delay: float, again: float | None = None) -> Outcome:
    """Start a run, interrupt it, and judge it.

    Args:
        step: wait until this step was logged; 0: from the start of the process.
        delay: seconds after that.
        again: seconds until a second interrupt; None: no other.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command(folder, kind), env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    file = folder / "train.log"
    while process.poll() is None and step and (not file.exists() or step not in log.read(str(file)).steps):
        time.sleep(0.02)
    time.sleep(delay)
    children = descendants(process.pid)
    process.send_signal(kind.signum)
    if again is not None:
        time.sleep(again)
        process.send_signal(kind.signum)
    killed = kind.signum == signal.SIGKILL
    if killed:
        process.wait()
        said = ""
    else:
        said = process.communicate(timeout=300)[0]
    return _judge(folder, process.returncode, said, children, forced=again is not None or killed)


def _judge(folder: Path, status: int, said: str, children: list[psutil.Process], forced: bool) -> Outcome:
    problems = []
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline and (alive := _alive(children)):
        time.sleep(0.1)
    if alive := _alive(children):
        problems.append(f"{len(alive)} processes still run")
    if forced:  # what the same command does first
        resume.before_start(["--load", str(folder / "checkpoints")], rank=0)
    saved = folders.latest_iteration(folder / "checkpoints")
    last = max(log.read(str(folder / "train.log")).steps, default=0) if (folder / "train.log").exists() else 0
    if "Traceback" in said:
        problems.append("a traceback")
    if (
        saved is not None
        and (state := check_structure(folders.checkpoint_path(folder / "checkpoints", saved)).state)
        != "complete"
    ):
        problems.append(f"step {saved} is {state}")
    if not forced and last > (saved or 0):
        problems.append(f"step {last} is lost")
    if status in (130, -signal.SIGINT) and "interrupted:" in said:
        problems += _untrue(said, saved, last)
    # The interpreter may end by SIGINT, which is 130 in a shell, if C code met the KeyboardInterrupt.
    elif status not in (0, 130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL):
        problems.append(f"status {status}")
    return Outcome(last, saved, status, said, tuple(problems))


def _untrue(said: str, saved: int | None, last: int) -> list[str]:
    final = said.strip().splitlines()[-1]
    if "nemotron3" in final:  # in the imports
        return [] if saved is None else [final]
    named = re.search(r"interrupted: (?:step (\d+) is saved|no checkpoint was saved)", final)
    if named is None or (int(named[1]) if named[1] else None) != saved:
        return [f"{saved} is saved, but it says {final!r}"]
    if last > (saved or 0) and not re.search(rf"(steps \d+ to|and step) {last} (are|is) lost", final):
        return [f"step {last} is lost, but it says {final!r}"]
    return []


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running()]


def moments(kind: Kind, count: int, seed: int) -> list[Outcome]:
    """Interrupt `count` runs. A quarter of the moments lie before the first step."""
    draw = random.Random(f"{seed} {kind}")
    outcomes = []
    for number in range(count):
        step = draw.randrange(1, STEPS + 1) if draw.random() < 0.75 else 0
        delay = draw.uniform(0, 0.4 if step < STEPS else 3.0) if step else draw.uniform(0.3, 12)
        again = draw.uniform(0, 1.0) if draw.random() < 0.15 else None
        with tempfile.TemporaryDirectory() as folder:
            outcome = interrupt(Path(folder) / "run", kind, step, delay, again)
        final = (outcome.said.strip().splitlines() or [""])[-1][-130:]
        verdict = "; ".join(outcome.problems) or "ok"
        twice = "" if again is None else f" and {again:.2f} s later"
        print(
            f"{number:3d} step {step} + {delay:.2f} s{twice}: "
            f"status {outcome.status}, logged {outcome.last}, saved {outcome.saved}: {verdict}: {final}",
            flush=True,
        )
        outcomes.append(outcome)
    return outcomes


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--signal", choices=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"], default="SIGINT")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kind = Kind(signal.Signals[given.signal], given.ranks, given.asynchronous)
    outcomes = moments(kind, given.moments, given.seed)
    bad = [outcome for outcome in outcomes if outcome.problems]
    print(f"{kind}: {len(outcomes)} moments, {len(bad)} not as described")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
