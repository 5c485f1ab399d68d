"""The driver of the GPU measurements (benchmarks/gpu.py), with stages that take no time or go wrong."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: A stage as a program: it notes that it ran, writes a row, and then does what its last word says.
PROGRAM = """
import json, os, subprocess, sys, time
name, what = sys.argv[1:3]
rows = sys.argv[sys.argv.index("--rows") + 1]
with open(rows, "a") as file:
    file.write(json.dumps({"kind": "value", "of": name}) + "\\n")
with open(os.environ["RAN"], "a") as file:
    file.write(name + "\\n")
def error(text):
    with open(rows, "a") as file:
        file.write(json.dumps({"error": text}) + "\\n" + '{"cut o')
if what == "raise":
    raise RuntimeError("this is wrong")
if what == "die":
    os.kill(os.getpid(), 11)
if what == "memory":
    error("OutOfMemoryError: too much")
    sys.exit(4)
if what == "skip":
    error("no such package")
    sys.exit(3)
if what == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["RAN"] + ".child", "w") as file:
        file.write(str(child.pid))
    child.wait()
"""
ABOUT = {"device": "NVIDIA H200", "versions": {"torch": "2"}}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the names of the stages that ran."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return tmp_path / "ran"


def stage(gpu: Any, name: str, what: str = "end", limit: int = 60, expected: int = 1) -> Any:
    return gpu.Stage(name, name, expected, limit, (sys.executable, "-c", PROGRAM, name, what))


def driver(gpu: Any, path: Path, budget: float = 60.0) -> Any:
    results = gpu.Results(path)
    gpu.begin(results, ABOUT, False)
    return gpu.Driver(results, "cuda", False, time.monotonic() + budget)


def statuses(gpu: Any, path: Path) -> dict[str, str]:
    """Read from the file."""
    return {name: record["status"] for name, record in gpu.Results(path).stages().items()}


def gone(pid: int) -> bool:
    """Whether a process has ended, its parent having collected it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


KINDS = {
    "good": ("end", "ok", ""),
    "wrong": ("raise", "failed", "RuntimeError: this is wrong"),
    "dead": ("die", "failed", "killed by SIGSEGV"),
    "large": ("memory", "memory", "OutOfMemoryError: too much"),
    "absent": ("skip", "skipped", "no such package"),
    "stuck": ("hang", "timeout", "killed after 2 s"),
    "last": ("end", "ok", ""),
}


def test_whatever_a_stage_does_the_next_one_runs(gpu: Any, ran: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    stages = [stage(gpu, n, what, 2 if what == "hang" else 60) for n, (what, *_) in KINDS.items()]
    assert driver(gpu, path).run(stages)
    found = gpu.Results(path).stages()
    for name, (_, status, error) in KINDS.items():
        assert (found[name]["status"], found[name]["error"]) == (status, error)
        assert found[name]["rows"] == [{"kind": "value", "of": name}]  # also of one that died later
        assert ("tail" in found[name]) == (status not in ("ok", "skipped"))
    assert "this is wrong" in found["wrong"]["tail"]
    assert gone(int(Path(f"{ran}.child").read_text()))  # what a stage started ends with it
    # Nothing is repeated, unless asked for.
    assert driver(gpu, path).run(stages) and ran.read_text().split() == list(KINDS)
    stages[1] = stage(gpu, "wrong")
    again = driver(gpu, path)
    assert again.run(stages[:4], lambda record: record["status"] == "failed")
    assert ran.read_text().split() == [*KINDS, "wrong", "dead"]
    assert statuses(gpu, path)["wrong"] == "ok" and len(gpu.Results(path).runs) == 3


def test_the_budget(gpu: Any, ran: Path, tmp_path: Path) -> None:
    """It ends before a stage that would not fit; one that it cuts off is tried again."""
    path = tmp_path / "results.jsonl"
    stages = [stage(gpu, "first"), stage(gpu, "slow", "hang", 600), stage(gpu, "long", expected=100)]
    assert not driver(gpu, path, budget=3).run(stages)
    assert statuses(gpu, path) == {"first": "ok", "slow": "interrupted"}
    stages[1] = stage(gpu, "slow")
    assert not driver(gpu, path, budget=50).run(stages)
    assert statuses(gpu, path) == {"first": "ok", "slow": "ok"}
    assert driver(gpu, path, budget=500).run(stages)
    assert ran.read_text().split() == ["first", "slow", "slow", "long"]


def start_program(gpu: Any, path: Path, *words: str) -> subprocess.Popen[str]:
    """gpu.py as a process, with two stages of its own: one ends, one hangs unless the file `go` exists."""
    code = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
from pathlib import Path
what = "end" if Path({str(path.with_name("go"))!r}).exists() else "hang"
gpu.STAGES = tuple(
    gpu.Stage(n, n, 1, 60, (sys.executable, "-c", {PROGRAM!r}, n, w)) for n, w in (("a", "end"), ("b", what))
)
gpu.identify = lambda device: {ABOUT!r}
sys.exit(gpu.main(["--results", {str(path)!r}, *{list(words)!r}]))
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_goes_on(gpu: Any, ran: Path, tmp_path: Path, signum: int) -> None:
    path = tmp_path / "results.jsonl"
    process, child = start_program(gpu, path), Path(f"{ran}.child")
    while not (child.exists() and child.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signum)
    output = process.communicate(timeout=60)[0]
    if signum == signal.SIGKILL:
        assert statuses(gpu, path) == {"a": "ok"}
        os.kill(int(child.read_text()), signal.SIGKILL)  # real stages watch their parent
    else:
        assert process.returncode == 130 and "the same command goes on from here" in output
        assert statuses(gpu, path) == {"a": "ok", "b": "interrupted"}
        assert gone(int(child.read_text()))
    path.with_name("go").touch()
    process = start_program(gpu, path)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "a: ok on" in output and "gpu_report.py" in output
    assert statuses(gpu, path) == {"a": "ok", "b": "ok"}
    assert ran.read_text().split() == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("words", "code", "stages"),
    [
        ([], 0, ["a", "b"]),
        (["--from", "b"], 0, ["b"]),
        (["--only", "a"], 0, ["a"]),
        (["--budget", "0.1s"], 3, []),
        (["--list"], 0, []),
        (["--only", "c"], 2, []),
        (["--device", "cpu"], 2, []),
    ],
    ids=str,
)
def test_options(gpu: Any, ran: Path, tmp_path: Path, words: list[str], code: int, stages: list[str]) -> None:
    tmp_path.joinpath("go").touch()
    process = start_program(gpu, tmp_path / "results.jsonl", *words)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    assert (ran.read_text().split() if ran.exists() else []) == stages
    assert code != 2 or (output.startswith("gpu.py: ") and len(output.splitlines()) == 1)
    assert code != 2 or not (tmp_path / "results.jsonl").exists()


def test_results_of_two_devices_are_not_mixed(gpu: Any, tmp_path: Path) -> None:
    results = gpu.Results(tmp_path / "results.jsonl")
    gpu.begin(results, ABOUT, False)
    for about, small in (({**ABOUT, "device": "NVIDIA H100"}, False), (ABOUT, True)):
        with pytest.raises(ValueError, match="give another file to --results"):
            gpu.begin(results, about, small)
    assert len(gpu.Results(results.path).lines) == 1


@pytest.mark.parametrize(
    "text",
    ["[1, 2]\n", "{}\n", "not JSON\n", '{"kind": "stage", "stage": "a", "status": "ok", "rows": []}\n', "\0"],
)
def test_another_file_is_refused(gpu: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="give another file"):
        gpu.Results(path)
    assert path.read_text() == text


def test_durations(gpu: Any) -> None:
    assert [gpu.duration(text) for text in ("540", "540s", "9m", "0.5h")] == [540, 540, 540, 1800]
    for wrong in ("", "9 m", "-1", "0m", "9d"):
        with pytest.raises(Exception, match="give 540, 9m or 0.5h"):
            gpu.duration(wrong)


def test_selected(gpu: Any) -> None:
    names = [s.name for s in gpu.selected(gpu.STAGES, ["step.nano", "plan"], None)]
    steps = ["step.nano.plain", "step.nano.hf", "step.nano.te"]
    assert names == [*steps, "plan", "step.nano.mamba-ssm"]
    assert gpu.selected(gpu.STAGES, [], "generate")[0].name == "generate.plain"
    with pytest.raises(ValueError, match="there is no stage 'generat': use versions, tests, "):
        gpu.selected(gpu.STAGES, ["generat"], None)


def test_stages_fit(gpu: Any) -> None:
    """All of them into 25 minutes, each into a call of ten; each has a body."""
    stages = importlib.import_module("gpu_stage")
    assert sum(stage.expected for stage in gpu.STAGES) <= 25 * 60
    assert all(stage.expected <= stage.limit <= 9 * 60 - gpu.GRACE for stage in gpu.STAGES)
    assert all(callable(stages.body(stage.name)) for stage in gpu.STAGES)
    assert len({stage.name for stage in gpu.STAGES}) == len(gpu.STAGES)


#: Lines of pytest -v, with and without pytest-xdist.
OUTPUT = """
tests/gpu/test_a.py::test_b[x y] PASSED                    [ 10%]
tests/gpu/test_a.py::test_c SKIPPED (no CUDA device)       [ 20%]
[gw1] [ 30%] PASSED tests/gpu/test_a.py::test_d[z]
[gw0] [ 40%] FAILED tests/gpu/test_a.py::test_e[1-2]
FAILED tests/gpu/test_a.py::test_e[1-2] - AssertionError: 1 == 2
"""


def test_results_of_tests_are_read(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, setting = importlib.import_module("gpu_stage"), importlib.import_module("gpu_setting")
    program = tmp_path / "pytest.py"
    program.write_text(f"print({OUTPUT!r}); raise SystemExit(1)")
    monkeypatch.setattr(stages, "pytest_words", lambda small: [sys.executable, str(program)])
    where = setting.Setting("cuda", False, tmp_path / "rows")
    assert stages.run_stage("tests", where) == 1
    counts, failure, error = (json.loads(line) for line in where.rows.read_text().splitlines())
    assert counts == {"kind": "tests", "passed": 2, "skipped": 1, "failed": 1, "ended": True}
    assert failure["test"].endswith("test_e[1-2]") and failure["why"] == "AssertionError: 1 == 2"
    assert error["error"] == "RuntimeError: 1 tests failed, pytest ended with status 1"


def test_standard_output_of_a_stage_has_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the programs that it starts print; here a line that begins like a row."""
    stages = importlib.import_module("gpu_stage")
    program = tmp_path / "pytest.py"
    program.write_text("print('{')")
    monkeypatch.setattr(stages, "pytest_words", lambda small: [sys.executable, str(program)])
    monkeypatch.setattr(sys, "argv", ["gpu_stage.py", "tests", "--device", "cpu", "--small"])
    assert stages.main() == 0
    printed = capsys.readouterr()
    assert printed.out == '{"kind": "tests", "ended": true}\n' and "{\n" in printed.err
