"""Everything that is measured on a GPU, in stages: the most valuable ones first, 25 minutes on one H200.

    make gpu                                               # all of it, into build/gpu/results.jsonl
    python benchmarks/gpu.py --budget 9m                   # as much as fits; the same command continues
    python benchmarks/gpu.py --from generate.drafts        # skip what comes before
    python benchmarks/gpu.py --only step.nano.te           # these alone, even if they are done
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --device cpu --small          # a rehearsal with tiny models

Every stage is a process of its own with a time limit (gpu_stage.py). Its result is written to the results
file when it ends, whatever its end was: an error, a crash, a lack of memory and the limit are results, too,
and the next stage starts. Stages with a result are skipped in the next call; --retry repeats those that went
wrong. What the stages print goes to a file beside the results, .log. gpu_report.py makes tables of the
results.

Exit status: 0 every stage has a good result; 1 one of them went wrong; 2 wrong arguments; 3 the budget ended
before all had run; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, parser
from gpu_results import Record, Results, whole_lines

STAGE = Path(__file__).with_name("gpu_stage.py")
RESULTS = Path("build/gpu/results.jsonl")
#: Exit statuses of gpu_stage.py -> status of the stage.
SKIPPED, OUT_OF_MEMORY = 3, 4
STATUS = {0: "ok", SKIPPED: "skipped", OUT_OF_MEMORY: "memory"}
#: Seconds in which a killed process should be gone; one that hangs in the driver may stay.
GRACE = 15
#: Seconds for the process that only names the device.
IDENTIFY = 120
#: Characters of a log that are kept with a result that went wrong.
TAIL = 3000


@dataclass(frozen=True)
class Stage:
    """One stage.

    expected: seconds that it may take on an H200, an estimate: nothing of it has run on a GPU yet. It starts
    only if so much of the budget is left. limit: seconds after which it is killed.
    """

    name: str
    title: str
    expected: int
    limit: int
    command: tuple[str, ...] = ()


WIDTHS = ("nano", "super")
#: Of a training step -> title. The order is that of their value.
SIDES = {
    "plain": "torch backend without mamba-ssm",
    "hf": "transformers at its best setting",
    "te": "stock TransformerEngine spec",
    "mamba-ssm": "torch backend with mamba-ssm's scan",
}


def _steps(*sides: str) -> Iterator[Stage]:
    for side in sides:
        for width in WIDTHS:
            yield Stage(f"step.{width}.{side}", f"training step, {width}, {SIDES[side]}", 70, 240)


STAGES = (
    Stage("versions", "doctor, versions, rates of the device", 60, 240),
    Stage("tests", "pytest -m gpu", 240, 480),
    *_steps("plain", "hf", "te"),
    Stage("plan", "memory and time of `nemotron3 plan` beside the steps that were measured", 20, 120),
    Stage("nvfp4", "cost of NVFP4 emulation", 80, 240),
    Stage("generate.plain", "generation, plain", 45, 240),
    Stage("generate.drafts", "generation with 1 to 7 drafts", 90, 300),
    Stage("prefill", "prefill of 1M tokens", 120, 300),
    Stage("boundary", "packing of rows between modules", 30, 120),
    *_steps("mamba-ssm"),
)


@dataclass
class Driver:
    """Runs stages one after the other.

    Args:
        deadline: when the budget ends, by `time.monotonic`.
    """

    results: Results
    device: str
    small: bool
    deadline: float

    def run(self, stages: Sequence[Stage], repeat: Callable[[Record], bool] = lambda record: False) -> bool:
        """Run the stages that have no result, and those of whose result `repeat` is true.

        Returns:
            Whether the budget sufficed.
        """
        for stage in stages:
            found = self.results.stages().get(stage.name)
            if found is not None and self.results.done(stage.name) and not repeat(found):
                say(f"{stage.name}: {found['status']} on {found['date']}, not repeated")
                continue
            left = self.deadline - time.monotonic()
            if left < stage.expected:
                say(f"{stage.name} takes about {stage.expected} s, {max(0, left):.0f} s are left: stopping")
                return False
            self._run_one(stage, left)
        return True

    def _run_one(self, stage: Stage, left: float) -> None:
        say(f"{stage.name}: {stage.title} …")
        log = self.results.path.with_suffix(".log")
        limit = min(float(stage.limit), left)
        began, status, error = time.monotonic(), "interrupted", ""
        with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
            output.write(f"\n== {stage.name}\n".encode())
            output.flush()
            start, rows_file = output.tell(), Path(folder) / "rows.jsonl"
            process = subprocess.Popen(
                self._command(stage, rows_file),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=stage_environment(),
            )
            try:
                code = process.wait(limit)
                status = STATUS.get(code, "failed")
                error = "" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            except subprocess.TimeoutExpired:
                # At its own limit it has failed; at the end of the budget the next call tries it again.
                status = "timeout" if limit == stage.limit else "interrupted"
                error = f"killed after {limit:.0f} s"
            finally:
                gone = end(process)
                rows = whole_lines(rows_file)
                told = [row.pop("error") for row in rows if "error" in row]
                record = {
                    "kind": "stage",
                    "stage": stage.name,
                    "status": status,
                    "seconds": round(time.monotonic() - began, 1),
                    "error": "; ".join(filter(None, (error, *told, *([] if gone else ["still there"])))),
                    "rows": [row for row in rows if row],
                }
                if status not in ("ok", "skipped"):
                    record["tail"] = tail(log, start)
                    record["error"] = record["error"] or last_line(record["tail"])
                self.results.add(record)
                suffix = f": {record['error']}" if record["error"] else ""
                say(f"{stage.name}: {status}, {record['seconds']:.0f} s, {len(record['rows'])} rows{suffix}")

    def _command(self, stage: Stage, rows: Path) -> list[str]:
        words = list(stage.command or (sys.executable, str(STAGE), stage.name))
        words += ["--rows", str(rows), "--results", str(self.results.path), "--device", self.device]
        return words + (["--small"] if self.small else [])


def end(process: subprocess.Popen[bytes]) -> bool:
    """Kill the process and everything that it started; return whether it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return False
    return True


def tail(log: Path, start: int) -> str:
    """The end of what a log has from byte `start` on."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL))
        return file.read().decode("utf-8", "replace")


def last_line(text: str) -> str:
    """The last line that names an error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def stage_environment() -> dict[str, str]:
    """Of a stage: no package asks a model hub, which takes minutes to fail where there is no network."""
    own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own}


def python_path() -> str:
    """The checkout in front of PYTHONPATH."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def duration(text: str) -> float:
    """Seconds: 540, 540s, 9m, 0.5h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: give 540, 9m or 0.5h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def selected(stages: Sequence[Stage], only: Sequence[str], first: str | None) -> list[Stage]:
    """The stages of --only and --from. A name also stands for all that begin with it and a dot.

    Raises:
        ValueError: there is no such stage.
    """

    def named(name: str) -> list[Stage]:
        found = [s for s in stages if s.name == name or s.name.startswith(f"{name}.")]
        if not found:
            raise ValueError(f"there is no stage {name!r}: use {', '.join(s.name for s in stages)}")
        return found

    if only:
        wanted = {stage.name for name in only for stage in named(name)}
        return [stage for stage in stages if stage.name in wanted]
    return list(stages[stages.index(named(first)[0]) :]) if first else list(stages)


def identify(device: str) -> Record:
    """Name and versions of what the stages will run on, from a process of its own.

    Raises:
        ValueError: there is no such device, or asking for it failed.
    """
    words = [sys.executable, str(STAGE), "identify", "--device", device]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=IDENTIFY, env=environment)
    except subprocess.TimeoutExpired:
        raise ValueError(f"asking torch for its devices took more than {IDENTIFY} s") from None
    if done.returncode:
        raise ValueError(last_line(done.stderr))
    about: Record = json.loads(done.stdout.splitlines()[-1])
    return about


def commit() -> str:
    """The commit of the checkout, "+" if files are changed; "" where git cannot say."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    with contextlib.suppress(OSError):
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    return ""


def begin(results: Results, about: Record, small: bool) -> None:
    """Add the line of this run.

    Raises:
        ValueError: the file has results of another device, or of another size.
    """
    for run in results.runs:
        for key, value in (("device", about["device"]), ("small", small)):
            if run[key] != value:
                raise ValueError(
                    f"{results.path} has results with {key} {run[key]!r}, this run has {value!r}: give "
                    "another file to --results"
                )
    command = shlex.join(["python", *sys.argv])
    results.add({"kind": "run", "small": small, "commit": commit(), "command": command, **about})


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    options.add_argument(
        "--budget", type=duration, default=duration("25m"), help="of this call; default: 25m"
    )
    options.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these alone, done or not")
    options.add_argument("--from", dest="first", metavar="STAGE", help="this one and those after it")
    options.add_argument("--retry", action="store_true", help="repeat what went wrong or was skipped")
    options.add_argument("--list", action="store_true", help="print the stages and their results, and end")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--small", action="store_true", help="tiny models, for a rehearsal")
    return options.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    began = time.monotonic()
    try:
        if args.device == "cpu" and not args.small:
            raise ValueError("--device cpu is a rehearsal with tiny models only: add --small")
        stages = selected(STAGES, args.only, args.first)
        results = Results(args.results)
        if args.list:
            show(stages, results)
            return 0
        about = identify(args.device)
        args.results.parent.mkdir(parents=True, exist_ok=True)
        begin(results, about, args.small)
    except (ValueError, OSError) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    say(f"{about['device']}; {len(stages)} stages, {args.budget / 60:.0f} min, results in {args.results}")
    driver = Driver(results, args.device, args.small, began + args.budget)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        enough = driver.run(stages, lambda found: bool(args.only) or (args.retry and found["status"] != "ok"))
    except KeyboardInterrupt:
        print("gpu.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    found = results.stages()
    good = all(found[s.name]["status"] in ("ok", "skipped") for s in stages if s.name in found)
    said = f"tables: python benchmarks/gpu_report.py {args.results}"
    print(said if enough else f"not finished: the same command goes on from here; {said}", flush=True)
    return 3 if not enough else 0 if good else 1


def show(stages: Sequence[Stage], results: Results) -> None:
    """Print the stages with what is known of each."""
    found: dict[str, Any] = results.stages()
    for stage in stages:
        status = found[stage.name]["status"] if stage.name in found else ""
        print(
            f"{stage.name:22} about {stage.expected:3} s, limit {stage.limit:3} s  {status:11} {stage.title}"
        )
    print(f"together about {sum(stage.expected for stage in stages) / 60:.0f} min")


if __name__ == "__main__":
    sys.exit(main())
