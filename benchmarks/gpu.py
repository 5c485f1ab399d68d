"""Everything that is measured on a GPU, in stages: the most valuable ones first, 25 minutes on one H200.

    make gpu                                               # all of it, into build/gpu/results.jsonl
    python benchmarks/gpu.py --budget 9                    # as much as fits into 9 minutes; it goes on later
    python benchmarks/gpu.py --only step.nano              # these alone, even if they are done
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --tables                      # of the results, for docs/measurements.md
    python benchmarks/gpu.py --packages build/gpu-pack     # install them first, see gpu_pack.py
    python benchmarks/gpu.py --device cpu --small          # a rehearsal with tiny models

Every stage is another benchmark, a process of its own with a time limit. It writes its rows when they are
known, and its result is written to the results file when it ends, whatever its end was: an error, a crash and
the limit are results, too, and the next stage starts. Stages with a result are not repeated in the next call,
unless --retry is given and they went wrong. What the stages print goes to a file beside the results, .log.

Exit status: 0 every stage has a good result; 1 one of them went wrong; 2 wrong arguments; 3 the budget ended
before all had run; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
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
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import ROOT, ROWS, parser, table
from gpu_pack import install

from megatron_nemotron3.common.files import read_outside, write_text

HERE = Path(__file__).parent
RESULTS = Path("build/gpu/results.jsonl")
#: ok: it ended. failed: an error, a failed test or a signal. timeout: it was killed at its limit.
#: interrupted: it was killed because the call ended, and is run again by the next one.
STATUSES = ("ok", "failed", "timeout", "interrupted")
#: Seconds in which a killed process should be gone; one that hangs in the driver may stay.
GRACE = 15
#: Seconds for the process that only names the device.
IDENTIFY = 120
#: Bytes of the largest results file that is read, and characters of a log that are kept with a bad result.
LIMIT, TAIL = 64 * 2**20, 3000
PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "mamba-ssm")
PACKAGES += ("causal-conv1d", "flash-attn")
#: Stage -> files with tests marked gpu. mamba-ssm's kernels and torch.compile take most of their time.
TESTS = {
    "kernels": ("tests/gpu/test_kernels.py", "tests/boundary/test_multimodule.py"),
    "models": ("tests/gpu/test_model.py", "tests/inference/generate", "tests/precision/test_golden.py"),
    "quantizer": ("tests/gpu/test_quantizer.py",),
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One stage.

    expected: seconds that it may take on an H200. It starts only if so much of the budget is left. limit:
    seconds after which it is killed. words: a script of this folder, which gets --device and --small, or a
    module (-m).
    """

    name: str
    title: str
    expected: int
    limit: int
    words: tuple[str, ...]

    def command(self, device: str, small: bool) -> list[str]:
        """What runs."""
        if self.words[0] == "-m":
            workers = ["-n", "6"] if "pytest" in self.words and find_spec("xdist") else []
            return [sys.executable, *self.words, *workers]
        options = ["--device", device, *(["--small"] if small else [])]
        return [sys.executable, str(HERE / self.words[0]), *self.words[1:], *options]


PYTEST = ("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider")
STAGES = (
    Stage("doctor", "what is here", 30, 120, ("-m", "megatron_nemotron3", "doctor")),
    *(Stage(f"tests.{n}", "pytest -m gpu", 150, 520, (*PYTEST, *files)) for n, files in TESTS.items()),
    Stage("step.nano", "training step, Nano's width", 350, 520, ("train_step.py", "--width", "nano")),
    Stage("step.super", "training step, Super's width", 350, 520, ("train_step.py", "--width", "super")),
    Stage("nvfp4", "cost of NVFP4 emulation", 150, 300, ("nvfp4.py",)),
    Stage("generate.plain", "generation, plain", 45, 240, ("generate.py",)),
    Stage("generate.drafts", "what drafts cost", 90, 300, ("generate.py", "--passes", "0")),
    Stage("boundary", "rows between modules, on one device", 30, 120, ("boundary_rows.py",)),
)


class Results:
    """The lines of one file, JSON. The file is replaced as a whole whenever a line is added.

    A reader therefore finds a valid file, whenever the program that writes it was killed. Two kinds of lines:

        {"kind": "run", "device": "NVIDIA H200", "small": false, "date": …, "versions": …, "command": …}
        {"kind": "stage", "stage": "tests", "status": "ok", "seconds": 71.2, "said": "…", "rows": […], …}

    If a stage has several lines, the last one counts.

    Raises:
        ValueError: the file was not written by gpu.py.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Record] = []
        text = read_outside(path, limit=LIMIT).decode("utf-8", "replace") if path.exists() else ""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found = json.loads(line)
                good = found["kind"] == "run" and "device" in found
                good = good or bool(
                    self.lines
                    and found["stage"]
                    and found["status"] in STATUSES
                    and found["rows"] is not None
                )
            except (ValueError, TypeError, KeyError):
                good = False
            if not good:
                raise ValueError(f"{path}, line {number}, is not a result of gpu.py: give another file")
            self.lines.append(found)

    def add(self, record: Record) -> None:
        """Add a line with the date, and write the file."""
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        self.lines.append({**record, "date": now})
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def runs(self) -> list[Record]:
        """The calls of gpu.py, the first one first."""
        return [line for line in self.lines if line["kind"] == "run"]

    def stages(self) -> dict[str, Record]:
        """Name -> the last line of each stage, in the order in which they first ran."""
        return {line["stage"]: line for line in self.lines if line["kind"] == "stage"}


@dataclass
class Driver:
    """Runs stages one after the other.

    deadline: when the budget ends, by `time.monotonic`. environment: of the stages.
    """

    results: Results
    device: str
    small: bool
    deadline: float
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, stages: Sequence[Stage], repeat: Callable[[Record], bool] = lambda record: False) -> bool:
        """Run the stages that have no result, and those of whose result `repeat` is true.

        Returns:
            Whether the budget sufficed.
        """
        for stage in stages:
            found = self.results.stages().get(stage.name)
            if found is not None and found["status"] != "interrupted" and not repeat(found):
                say(f"{stage.name}: {found['status']} on {found['date']}, not repeated")
                continue
            left = self.deadline - time.monotonic()
            if left < stage.expected:
                say(f"{stage.name} takes about {stage.expected} s, {max(0, left):.0f} s are left: stopping")
                return False
            self._run_one(stage, left)
            if self.results.stages()[stage.name]["status"] == "interrupted":
                return False
        return True

    def _run_one(self, stage: Stage, left: float) -> None:
        say(f"{stage.name}: {stage.title} …")
        log = self.results.path.with_suffix(".log")
        limit = min(float(stage.limit), left)
        began, status, said = time.monotonic(), "interrupted", ""
        with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
            output.write(f"\n== {stage.name}\n".encode())
            output.flush()
            start, rows = output.tell(), Path(folder) / "rows.jsonl"
            process = subprocess.Popen(
                stage.command(self.device, self.small),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env={**self.environment, ROWS: str(rows)},
            )
            try:
                code = process.wait(limit)
                status = "failed" if code else "ok"
                said = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
            except subprocess.TimeoutExpired:
                # At its own limit it has failed; at the end of the budget the next call tries it again.
                status = "timeout" if limit == stage.limit else "interrupted"
                said = f"killed after {limit:.0f} s"
            finally:
                said += "" if end(process) else " (still there)"
                printed, found = tail(log, start), whole_lines(rows)
                if status != "ok" or not found:
                    said = said or last_line(printed)
                record = {
                    "kind": "stage",
                    "stage": stage.name,
                    "status": status,
                    "seconds": round(time.monotonic() - began, 1),
                    "said": said,
                    "rows": found,
                }
                if status != "ok":
                    record["tail"] = printed
                self.results.add(record)
                say(f"{stage.name}: {status}, {record['seconds']:.0f} s, {len(found)} rows {said}".rstrip())


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
    """The last line that names an error, or else the last one that is no row of a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("|")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def whole_lines(path: Path) -> list[Record]:
    """The rows that a stage has written so far; a line that was cut off is left out."""
    rows = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(text))
    return [row for row in rows if isinstance(row, dict)]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def environment_of(packages: Path | None, into: Path) -> dict[str, str]:
    """Of the stages, with what a pack brings.

    No package asks a model hub, which takes minutes to fail where there is no network.
    """
    made = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    extra = {"PYTHONPATH": [str(ROOT)]}
    for name, folders in (install(packages, into) if packages else {}).items():
        extra.setdefault(name, []).extend(folders)
    sys.path[:0] = extra["PYTHONPATH"]  # for what is asked for by name here
    for name, folders in extra.items():
        made[name] = os.pathsep.join([*folders, *filter(None, [os.environ.get(name)])])
    return made


def selected(only: Sequence[str]) -> list[Stage]:
    """The stages of --only, or all. A name also stands for all that begin with it and a dot.

    Raises:
        ValueError: there is no such stage.
    """
    for name in only:
        if not any(f"{stage.name}.".startswith(f"{name}.") for stage in STAGES):
            raise ValueError(f"there is no stage {name!r}: use {', '.join(s.name for s in STAGES)}")
    wanted = [stage for stage in STAGES if any(f"{stage.name}.".startswith(f"{name}.") for name in only)]
    return wanted if only else list(STAGES)


def device_of(kind: str, environment: dict[str, str]) -> str:
    """Name of the device that the stages will run on, asked for in a process of its own.

    Raises:
        ValueError: there is no such device, or asking for it failed.
    """
    if kind == "cpu":
        return "CPU"
    code = "import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name())"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=IDENTIFY, env=environment)
    if done.returncode:
        said = last_line(done.stderr)
        raise ValueError(f"no CUDA device here ({said}): rehearse with --device cpu --small")
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Package -> version, and that of the driver of the GPU."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if find_spec(name.replace("-", "_")) is not None:
                found[name] = "sources"
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError):
        found["driver"] = subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    return found


def commit() -> str:
    """The commit of the checkout, with "-dirty" if files are changed; "" where git cannot say."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return ""


def begin(results: Results, about: Record) -> None:
    """Add the line of this run.

    Raises:
        ValueError: the file has results of another device, or of another size.
    """
    for run, key in ((run, key) for run in results.runs for key in ("device", "small")):
        if run[key] != about[key]:
            raise ValueError(
                f"{results.path} has results with {key} {run[key]!r}, this run has {about[key]!r}: give "
                "another file to --results"
            )
    results.add({"kind": "run", "commit": commit(), "command": shlex.join(["python", *sys.argv]), **about})


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    options.add_argument("--budget", type=float, default=25.0, help="minutes of this call; default: 25")
    options.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these alone, done or not")
    options.add_argument("--retry", action="store_true", help="repeat what went wrong")
    options.add_argument("--list", action="store_true", help="print the stages and their results, and end")
    options.add_argument("--tables", action="store_true", help="print tables of the results, and end")
    options.add_argument("--packages", type=Path, help="a folder that gpu_pack.py made")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--small", action="store_true", help="tiny models, for a rehearsal")
    return options.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    began = time.monotonic()
    try:
        if args.device == "cpu" and not args.small:
            raise ValueError("--device cpu is a rehearsal with tiny models only: add --small")
        stages = selected(args.only)
        results = Results(args.results)
        if args.list or args.tables:
            print("\n".join(listed(stages, results) if args.list else tables(results)))
            return 0
        args.results.parent.mkdir(parents=True, exist_ok=True)
        environment = environment_of(args.packages, args.results.parent / "site")
        device = device_of(args.device, environment)
        begin(results, {"device": device, "small": args.small, "versions": versions()})
    except (ValueError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    say(f"{device}; {len(stages)} stages, {args.budget:.0f} min, results in {args.results}")
    driver = Driver(results, args.device, args.small, began + 60 * args.budget, environment)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        enough = driver.run(stages, lambda found: bool(args.only) or (args.retry and found["status"] != "ok"))
    except KeyboardInterrupt:
        print("gpu.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    found = results.stages()
    good = all(found[s.name]["status"] == "ok" for s in stages if s.name in found)
    said = f"tables: python benchmarks/gpu.py --tables --results {args.results}"
    print(said if enough else f"not finished: the same command goes on from here; {said}", flush=True)
    return 3 if not enough else 0 if good else 1


def listed(stages: Sequence[Stage], results: Results) -> list[str]:
    """The stages with what is known of each."""
    found = results.stages()
    return table(
        {
            "stage": stage.name,
            "what": stage.title,
            "about s": stage.expected,
            "limit s": stage.limit,
            "result": found.get(stage.name, {}).get("status"),
        }
        for stage in stages
    )


def tables(results: Results) -> Iterator[str]:
    """Everything for which there are results, as Markdown."""
    runs, found = results.runs, results.stages()
    if not runs:
        raise ValueError(f"{results.path} has no results: make gpu writes it")
    if any(run["small"] or run["device"] == "CPU" for run in runs):
        yield "A rehearsal with tiny models: no figure here is a measurement."
    last, dates = runs[-1], sorted({line["date"][:10] for line in results.lines})
    commits = dict.fromkeys(run["commit"] or "unknown" for run in runs)
    commands = dict.fromkeys("`{command}`".format(**run) for run in runs)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    yield f"{last['device']}, {days}, commit {', '.join(commits)}."
    yield ", ".join(f"{name} {version}" for name, version in last["versions"].items()) + "."
    yield f"Commands: {', '.join(commands)}."
    yield ""
    yield from table(
        {"stage": name, "result": one["status"], "s": round(one["seconds"]), "said": one["said"]}
        for name, one in found.items()
    )
    for name, one in found.items():
        # Rows of a kind with other columns stand in a table of their own.
        groups: dict[tuple[str, ...], list[Record]] = {}
        for row in one["rows"]:
            groups.setdefault((row.pop("kind"), *row), []).append(row)
        for (kind, *_), rows in groups.items():
            yield from ("", f"{name}: {kind}", "", *table(rows))


if __name__ == "__main__":
    sys.exit(main())
