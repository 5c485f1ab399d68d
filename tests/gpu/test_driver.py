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
rows = os.environ["NEMOTRON3_BENCHMARK_ROWS"]
with open(rows, "a") as file:
    file.write(json.dumps({"kind": "value", "of": name}) + "\\n" + '{"cut o')
with open(os.environ["RAN"], "a") as file:
    file.write(name + "\\n")
if what == "raise":
    raise RuntimeError("this is wrong")
if what == "die":
    os.kill(os.getpid(), 11)
if what == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["RAN"] + ".child", "w") as file:
        file.write(str(child.pid))
    child.wait()
print("done")
"""
ABOUT = {"device": "NVIDIA H200", "small": False, "versions": {"torch": "2"}}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the names of the stages that ran."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    tmp_path.joinpath("program.py").write_text(PROGRAM)
    return tmp_path / "ran"


def stage(gpu: Any, ran: Path, name: str, what: str = "end", limit: int = 60, expected: int = 1) -> Any:
    return gpu.Stage(name, name, expected, limit, (str(ran.with_name("program.py")), name, what))


def driver(gpu: Any, path: Path, budget: float = 60.0) -> Any:
    results = gpu.Results(path)
    gpu.begin(results, ABOUT)
    return gpu.Driver(results, "cuda", False, time.monotonic() + budget, dict(os.environ))


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
    "stuck": ("hang", "timeout", "killed after 2 s"),
    "last": ("end", "ok", ""),
}


@pytest.mark.full
def test_whatever_a_stage_does_the_next_one_runs(gpu: Any, ran: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    stages = [stage(gpu, ran, n, what, 2 if what == "hang" else 60) for n, (what, *_) in KINDS.items()]
    assert driver(gpu, path).run(stages)
    found = gpu.Results(path).stages()
    for name, (_, status, said) in KINDS.items():
        assert (found[name]["status"], found[name]["said"]) == (status, said)
        assert found[name]["rows"] == [{"kind": "value", "of": name}]  # also of one that died later
        assert ("tail" in found[name]) == (status != "ok")
    assert "this is wrong" in found["wrong"]["tail"]
    assert gone(int(Path(f"{ran}.child").read_text()))  # what a stage started ends with it
    # Nothing is repeated, unless asked for.
    assert driver(gpu, path).run(stages) and ran.read_text().split() == list(KINDS)
    stages[1] = stage(gpu, ran, "wrong")
    again = driver(gpu, path)
    assert again.run(stages[:3], lambda record: record["status"] == "failed")
    assert ran.read_text().split() == [*KINDS, "wrong", "dead"]
    assert statuses(gpu, path)["wrong"] == "ok" and len(gpu.Results(path).runs) == 3


@pytest.mark.full
def test_the_budget(gpu: Any, ran: Path, tmp_path: Path) -> None:
    """It ends before a stage that would not fit; one that it cuts off is tried again."""
    path = tmp_path / "results.jsonl"
    stages = [stage(gpu, ran, "first"), stage(gpu, ran, "slow", "hang", 600)]
    stages.append(stage(gpu, ran, "long", expected=100))
    assert not driver(gpu, path, budget=3).run(stages)
    assert statuses(gpu, path) == {"first": "ok", "slow": "interrupted"}
    stages[1] = stage(gpu, ran, "slow")
    assert not driver(gpu, path, budget=50).run(stages)
    assert statuses(gpu, path) == {"first": "ok", "slow": "ok"}
    assert driver(gpu, path, budget=500).run(stages)
    assert ran.read_text().split() == ["first", "slow", "slow", "long"]


def start_program(ran: Path, path: Path, *words: str) -> subprocess.Popen[str]:
    """gpu.py as a process, with two stages of its own: one ends, one hangs unless the file `go` exists."""
    code = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
from pathlib import Path
what = "end" if Path({str(path.with_name("go"))!r}).exists() else "hang"
program = {str(ran.with_name("program.py"))!r}
gpu.STAGES = tuple(gpu.Stage(n, n, 1, 60, (program, n, w)) for n, w in (("a", "end"), ("b", what)))
gpu.device_of = lambda kind, environment: "NVIDIA H200"
sys.exit(gpu.main(["--results", {str(path)!r}, *{list(words)!r}]))
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_goes_on(gpu: Any, ran: Path, tmp_path: Path, signum: int) -> None:
    path = tmp_path / "results.jsonl"
    process, child = start_program(ran, path), Path(f"{ran}.child")
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
    process = start_program(ran, path)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "a: ok on" in output and "gpu.py --tables" in output
    assert statuses(gpu, path) == {"a": "ok", "b": "ok"}
    assert ran.read_text().split() == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("words", "code", "stages"),
    [
        ([], 0, ["a", "b"]),
        (["--only", "a"], 0, ["a"]),
        (["--budget", "0.001"], 3, []),
        (["--list"], 0, []),
        (["--tables"], 2, []),
        (["--only", "c"], 2, []),
        (["--packages", "/none"], 2, []),
        (["--device", "cpu"], 2, []),
    ],
    ids=str,
)
def test_options(ran: Path, tmp_path: Path, words: list[str], code: int, stages: list[str]) -> None:
    tmp_path.joinpath("go").touch()
    process = start_program(ran, tmp_path / "results.jsonl", *words)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    assert (ran.read_text().split() if ran.exists() else []) == stages
    assert code != 2 or (output.startswith("gpu.py: ") and len(output.splitlines()) == 1)
    assert code != 2 or not (tmp_path / "results.jsonl").exists()


def test_results_of_two_devices_are_not_mixed(gpu: Any, tmp_path: Path) -> None:
    results = gpu.Results(tmp_path / "results.jsonl")
    gpu.begin(results, ABOUT)
    for about in ({**ABOUT, "device": "NVIDIA H100"}, {**ABOUT, "small": True}):
        with pytest.raises(ValueError, match="give another file to --results"):
            gpu.begin(results, about)
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


def test_selected(gpu: Any) -> None:
    names = [s.name for s in gpu.selected(["step", "doctor", "generate.plain"])]
    assert names == ["doctor", "step.nano", "step.super", "generate.plain"]
    with pytest.raises(ValueError, match="there is no stage 'generat': use doctor, tests.kernels, "):
        gpu.selected(["generat"])


def test_stages_fit(gpu: Any) -> None:
    """All of them into 25 minutes, each into a call of ten; each has a program."""
    assert sum(stage.expected for stage in gpu.STAGES) <= 25 * 60
    assert all(stage.expected <= stage.limit <= 9 * 60 - gpu.GRACE for stage in gpu.STAGES)
    assert all((BENCHMARKS / s.words[0]).is_file() for s in gpu.STAGES if s.words[0] != "-m")
    assert len({stage.name for stage in gpu.STAGES}) == len(gpu.STAGES)


def test_tables(gpu: Any, tmp_path: Path) -> None:
    """Versions, commands, what became of the stages, and their rows; those of other columns apart."""
    results = gpu.Results(tmp_path / "r")
    results.add({"kind": "run", **ABOUT, "commit": "abc", "command": "c"})
    rows = [{"kind": "pack", "pieces": 1, "GB/s": 3000.0}, {"kind": "pack", "pieces": 16, "GB/s": 0.25}]
    rows += [{"kind": "model", "model": "Nano | 9 layers"}, {"kind": "pack", "other": None}]
    stage = {"kind": "stage", "stage": "boundary", "status": "timeout", "seconds": 7.0, "said": "killed"}
    results.add({**stage, "rows": rows})
    lines = list(gpu.tables(gpu.Results(tmp_path / "r")))
    assert lines[0].startswith("NVIDIA H200, ") and lines[0].endswith(", commit abc.")
    assert lines[1:3] == ["torch 2.", "Commands: `c`."]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert cells[:2] == [["stage", "result", "s", "said"], ["boundary", "timeout", "7", "killed"]]
    assert cells[2:5] == [["pieces", "GB/s"], ["1", "3,000"], ["16", "0.250"]]
    assert cells[5:] == [["model"], ["Nano / 9 layers"], ["other"], ["-"]]
    assert lines.count("boundary: pack") == 2


@pytest.mark.parametrize(("device", "small"), [("CPU", True), ("NVIDIA H200", True)])
def test_a_rehearsal_says_so(gpu: Any, tmp_path: Path, device: str, small: bool) -> None:
    results = gpu.Results(tmp_path / "r")
    gpu.begin(results, {**ABOUT, "device": device, "small": small})
    assert next(gpu.tables(results)) == "A rehearsal with tiny models: no figure here is a measurement."


def test_without_a_gpu_nothing_begins(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--results", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert done.returncode == 2 and not path.exists() and not done.stdout
    assert done.stderr.startswith("gpu.py: no CUDA device here") and len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_everything_on_a_cpu(gpu: Any, tmp_path: Path) -> None:
    """All stages as processes: no budget, interrupted in a stage, continued, and the tables."""
    path = tmp_path / "results.jsonl"
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--small", "--results", str(path)]

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *more], capture_output=True, text=True, timeout=1500)

    done = call("--budget", "0.02")
    assert done.returncode == 3 and "the same command goes on from here" in done.stdout, done.stderr
    process, log = subprocess.Popen(words, stdout=subprocess.DEVNULL), path.with_suffix(".log")
    while not (log.exists() and "\n== tests.kernels\n" in log.read_text(errors="replace")):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    before = gpu.Results(path).stages()
    assert {name: stage["status"] for name, stage in before.items()} == {
        "doctor": "ok",
        "tests.kernels": "interrupted",
    }
    done = call("--budget", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    found = gpu.Results(path).stages()
    assert list(found) == [stage.name for stage in gpu.STAGES] and found["doctor"] == before["doctor"]
    for width in ("nano", "super"):
        rows = [row for row in found[f"step.{width}"]["rows"] if row["kind"] == "side"]
        assert [row["logits"].endswith(" agree") for row in rows if "logits" in row] == [True, True]
        assert "install" in rows[2]["settings"] and "install" in rows[3]["settings"]
    drafts = found["generate.drafts"]["rows"]
    assert (drafts[-1]["what"], float(drafts[-1]["tokens"])) == ("step with 7 drafts", 8.0)
    kinds = {name: {row["kind"] for row in stage["rows"]} for name, stage in found.items()}
    assert kinds["boundary"] == {"pack", "align"} and kinds["nvfp4"] == {"model", "step"}
    tables = subprocess.run([*words, "--tables"], capture_output=True, text=True, check=True).stdout
    assert tables.startswith("A rehearsal") and "**differ**" not in tables
    assert json.loads(path.read_text().splitlines()[0])["device"] == "CPU"
