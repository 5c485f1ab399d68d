"""What stops a command before its work, and how an interrupted one ends (docs/training.md)."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import __main__, cli, run
from megatron_nemotron3.common.interrupts import GROUP_SIGNALS
from megatron_nemotron3.common.limits import ChildError
from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.schedule import require_schedule
from megatron_nemotron3.train import processes as machine
from tests.support.smallest_tokenizer import SMALLEST

ROOT = Path(__file__).parents[1]

PLOTS = (
    ["report", "monitors", ".", "--output"],
    ["precision", "super", "--output"],
)


class PanicException(BaseException):
    """As extension modules in Rust raise it: no Exception."""


def _deeper() -> None:
    _deeper()


def _raising(problem: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise problem

    return work


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (
            _raising(PanicException("called `unwrap()`\x1b[2J\non None")),
            "`unwrap()`\\x1b[2J on None (",
        ),
        (_raising(MemoryError()), "check: not enough memory (test_guards.py, line "),
        (_raising(TypeError("x")), "check: TypeError: x (test_guards.py, line "),
        (_deeper, "check: a file is nested too deeply (test_guards.py, line "),
    ],
    ids=["panic", "memory", "type", "depth"],
)
def test_what_no_command_has_a_message_for(
    work: Callable[[], int], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and status 2; a script's own error keeps its traceback."""
    monkeypatch.setattr(cli, "main", work)
    monkeypatch.setattr(sys, "argv", ["nemotron3", "check", "x"])
    before = [signal.getsignal(one) for one in GROUP_SIGNALS]
    try:
        assert __main__.main() == 2
        said = capsys.readouterr().err
        assert said.startswith("nemotron3 check: ") and line in said and said.count("\n") == 1
        monkeypatch.setattr(sys, "argv", ["nemotron3", "run", "script.py"])
        with pytest.raises((PanicException, MemoryError, TypeError, RecursionError)):
            __main__.main()
    finally:
        __main__._ended = False
        for one, handler in zip(GROUP_SIGNALS, before):
            signal.signal(one, handler)


@pytest.fixture
def nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of these commands fails the test."""

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    for name in (
        "train.monitor.events.read",
        "common.parser.resolve_device",
    ):
        monkeypatch.setattr(f"megatron_nemotron3.{name}", work)


@pytest.mark.parametrize("command", PLOTS, ids=lambda words: words[0])
@pytest.mark.usefixtures("nothing_is_done")
def test_a_bad_place_is_noticed_before_the_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    places = {
        "missing/x.png": "mkdir -p",
        ".": "is a folder: give the name of a file",
        "pipe": "is not a regular file",
        "file/x.png": "is not a folder",
        "/proc/x.png": "no file can be made in /proc",
        "/dev/null": "is not a regular file",
    }
    for place, said in places.items():
        assert cli.main([*command, str(tmp_path / place)]) == 2, place
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.usefixtures("nothing_is_done")
def test_a_plot_without_matplotlib_is_noticed_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main([*PLOTS[0], str(tmp_path / "x.png")]) == 2
    assert "package matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data-path", "x", "--tokenizer", "none"], "--tokenizer none is missing: give a folder"),
        (["--data-path", "x", "--tokenizer", "file"], "--tokenizer file is a file: give a folder"),
        (["--data-path", "x", "--tokenizer", "."], "--tokenizer . holds no tokenizer"),
        (["--data-path", "x"], "--data-path needs --tokenizer DIR"),
        (["--data-path", "0.5", "x", "--tokenizer", "tok"], "--data-path x: there is no file x.bin"),
        (["--data-path", "x", "--tokenizer", "tok", "--text", "file"], "--text and --data-path both"),
        (["--tokenizer", "tok"], "--tokenizer goes with --data-path"),
        (["--text", "none"], "--text none does not exist"),
        (["--max-bytes", "0"], "--max-bytes 0: give 1 or more"),
        (["--output", "file"], "--output file is a file: give a folder"),
    ],
)
@pytest.mark.usefixtures("nothing_is_done")
def test_what_train_cannot_read_is_noticed_before_anything_is_imported(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok/tokenizer.json").write_text(SMALLEST)
    assert cli.main(["train", "nano", "--tiny", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tok"]


def test_a_tokenizer_that_is_none_fails_before_any_import(tmp_path: Path) -> None:
    for words in (["generate", ".", "--prompt", "x"], ["evaluate", "."]):
        code = (
            "import sys; sys.modules |= dict.fromkeys(('torch', 'megatron', 'transformers', 'numpy'))\n"
            f"from megatron_nemotron3 import cli; sys.exit(cli.main({[*words, '--tokenizer', '/none']}))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and "--tokenizer /none is missing" in done.stderr
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_cores_or_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch.of("nano", tiny=True, precision="fp32", backend="torch", dp=4)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(machine, "free_memory", lambda: 4 << 30)
    assert machine.shortages(launch) == []
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "free_memory", lambda: 2 << 30)
    cores, memory = machine.shortages(launch)
    assert cores == "4 ranks share 2 cores: each rank gets 0.50 of a core at most"
    assert memory.startswith("4 ranks need about 3.0 GiB of memory (0.7 GiB each for Megatron itself)")
    assert "2.0 GiB are free" in memory
    with pytest.raises(ValueError, match="100,000 ranks of a CPU: give a layout of at most 1,024"):
        machine.machines(100_000, "cpu")


def test_a_training_without_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options of `flags NAME` alone: stderr says what is missing, and no rank starts without it."""
    assert cli.main(["flags", "nano"]) == 0
    printed = capsys.readouterr()
    assert "the options have no --lr and no --train-iters" in printed.err
    script = tmp_path / "pretrain_hybrid.py"
    script.touch()
    with pytest.raises(SystemExit) as stopped:
        run.main(["--device", "cpu", str(script), *printed.out.split()])
    assert stopped.value.code == 2
    assert "pretrain_hybrid.py needs --lr and --train-iters: give them" in capsys.readouterr().err
    words = ["--hybrid-layer-pattern", "M*", "--skip-train"]
    with pytest.raises(SystemExit):
        run.main(["--device", "cpu", str(script), *words])
    assert "pretrain_hybrid.py needs --micro-batch-size: give it" in capsys.readouterr().err
    require_schedule("pretrain_hybrid.py", [*words, "--micro-batch-size=2"])
    require_schedule("tools/checkpoint.py", [])
    assert cli.main(["flags", "nano", "--schedule", "published"]) == 0
    printed = capsys.readouterr()
    assert "the options have no" not in printed.err
    require_schedule("pretrain_hybrid.py", printed.out.split())


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB that takes names but no bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process cannot mount a file system")
    try:
        (folder / "ballast").write_bytes(bytes(256 * 1024))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", [PLOTS[1], ["precision", "super", "--yaml"]], ids=lambda words: words[-1])
def test_a_full_disk_leaves_no_file(
    command: list[str], full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, str(full_disk / "out")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in full_disk.iterdir()] == ["ballast"]


def test_stdout_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "megatron_nemotron3", "flags", "nano", "--schedule", "published"]
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "nemotron3 flags: [Errno 28] No space left on device\n"


def test_a_rank_without_processes_for_a_pickle_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while it checks the teacher, before its folders."""

    def check(*_: Any) -> None:
        raise ChildError("no process to try a pickle in: Resource temporarily unavailable")

    monkeypatch.setattr(run, "check_distillation", check)
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit) as ended:
        run.main([str(tmp_path / "script.py")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "no process to try a pickle in" in error and error.count("\n") == 1


def test_doctor_without_torch(tmp_path: Path) -> None:
    """In an environment without any package."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    words = [str(bare / "bin/python"), "-m", "megatron_nemotron3", "doctor"]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    verdict = done.stdout.splitlines()[-3:]
    assert verdict[0] == "verdict"
    assert verdict[1].split(maxsplit=2)[2] == "this environment cannot train: torch, megatron-core"
    assert verdict[2].strip() == "-> pip install 'megatron-nemotron3[train]'"
    assert "ModuleNotFoundError" not in done.stdout


#: What packages do with an interrupt while they are imported.
IMPORTS = {
    "passes": "time.sleep(60)",
    "swallows": "try:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)",
    "renames": "try:\n    time.sleep(60)\nexcept BaseException as e:\n    raise ImportError('broken') from e",
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["train", "nano", "--tiny"], "passes"),
        (["run", "script.py"], "swallows"),
        (["generate", ".", "--prompt", "x"], "renames"),
    ],
)
def test_an_interrupt_during_an_import(command: list[str], kind: str, tmp_path: Path) -> None:
    code = f"import sys, time\nprint('importing', flush=True)\n{IMPORTS[kind]}\n"
    (tmp_path / "torch.py").write_text(code)
    (tmp_path / "script.py").touch()
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", "megatron_nemotron3", *command]
    with subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.strip().endswith("interrupted") and said.strip().count("\n") == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [["doctor"], ["plan", "ultra", "--gpus", "3072", "--gpu", "gb200"]], ids=lambda words: words[0]
)
def test_an_interrupt_at_random_moments(command: list[str]) -> None:
    """Of the command and its children, as a terminal sends it; after Python itself has started."""
    randomness = random.Random(0)
    program = "import runpy; print(flush=True); runpy.run_module('megatron_nemotron3', run_name='__main__')"
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", program, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(randomness.uniform(0.05, 1.5))
            os.killpg(process.pid, signal.SIGINT)
            out, said = process.communicate(timeout=30)
        assert "Traceback" not in said + out, said
        assert process.returncode in (130, 0, 1)  # it may have ended before
