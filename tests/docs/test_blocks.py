"""The code blocks of README and docs/ run as they stand (`tests.docs.blocks` has the rules).

All blocks are parsed; that they run, and the examples that take long, is for `make test-full`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.cli import table
from megatron_nemotron3.train import processes
from tests.docs.blocks import NEMOTRON3, PAGES, ROOT, Block, blocks, write_stand_ins
from tests.support.programs import follow_forked, run_python

#: Commands whose example takes more than a second; files of their own test them.
SLOW = {"doctor", "certify", "train", "run", "finetune", "evaluate", "bisect"}
SLOW |= {"train boost", "distill logits", "report", "report monitors", "plan refit", "chat", "prune"}
SLOW.add("convert from-hf")
#: Commands whose result is not a report.
NO_JSON = {"train", "run", "finetune", "train boost", "chat", "distill logits", "prune"}
#: Commands that do something themselves.
EXAMPLES = {name: command for name, command in table.COMMANDS.items() if command.module}
REPORTING = [
    pytest.param(command, id=name, marks=pytest.mark.full if name in SLOW else ())
    for name, command in EXAMPLES.items()
    if name not in NO_JSON
]
BLOCKS = [block for page in PAGES for block in blocks(page)]


def run(words: list[str], folder: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a page's folder."""
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=580)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with stand-ins for `nemotron3` and for launchers."""
    folder = tmp_path_factory.mktemp("bin")
    write_stand_ins(folder)
    return folder


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a page to the folder its blocks run in."""
    trained = tmp_path_factory.mktemp("demo")
    words = ["train", "super", "--tiny", "--device", "cpu", "--output", str(trained / "runs" / "demo")]
    short = ["--steps", "2", "--max-bytes", "1000000", "--", "--eval-iters", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "follow", follow_forked)
        assert cli.main([*words, *short]) == 0
    folders: dict[str, Path] = {}

    def folder_of(page: str) -> Path:
        if page not in folders:
            folders[page] = tmp_path_factory.mktemp(Path(page).stem)
            shutil.copytree(trained / "runs", folders[page] / "runs")
            for path in ROOT.iterdir():
                if not path.name.startswith(".") and path.name not in ("runs", "build"):
                    (folders[page] / path.name).symlink_to(path)
        return folders[page]

    return folder_of


def parses(block: Block) -> None:
    """Fail unless Python or bash reads the block, and `nemotron3` the options of its commands."""
    if block.language == "python":
        compile(block.text, f"{block.page}:{block.line}", "exec")
        return
    read = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    assert read.returncode == 0, (block.page, block.line, read.stderr)
    for words in block.nemotron3_commands() or []:
        end = words.index("--") if "--" in words else len(words)
        if words[0] != "run" and not {"…", "--config"} & {*words}:  # run passes on what it does not know
            cli.parser(words).parse_args(words[:end])


@pytest.mark.parametrize("page", PAGES)
def test_blocks_parse(page: str) -> None:
    """Also those that cannot run here."""
    for block in blocks(page):
        try:
            parses(block)
        except SystemExit as refused:
            pytest.fail(f"{page}:{block.line}: {block.text} exits with {refused.code}")


def test_what_does_not_parse_is_found() -> None:
    for language, text in (("python", "a b"), ("bash", "if x"), ("bash", "nemotron3 plan super --layers 3")):
        with pytest.raises((SyntaxError, AssertionError, SystemExit)):
            parses(Block("page", 1, language, text, ""))


@pytest.mark.full
@pytest.mark.parametrize(
    "block", [pytest.param(block, id=f"{block.page}:{block.line}") for block in BLOCKS if block.runs]
)
def test_block(block: Block, page_folder: Callable[[str], Path], programs: Path) -> None:
    """Each runs to its end with exit code 0.

    Python and plain `nemotron3` commands run in processes forked with Megatron imported, the rest in bash.
    """
    folder, commands = page_folder(block.page), block.nemotron3_commands()
    if block.language == "python":
        finished = [run_python(["-c", block.text], folder)]
    elif commands and block.mark != "full":
        finished = [run_python(["-c", NEMOTRON3, *words], folder) for words in commands]
    else:
        finished = [run(["bash", "-euo", "pipefail", "-c", block.text], folder, programs)]
    for done in finished:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.full
def test_the_loop_of_ones_own_resumes(page_folder: Callable[[str], Path]) -> None:
    """An interrupted run of the page's program prints what the others print, to the last digit."""
    folder = page_folder("loop")
    (block,) = (block for block in BLOCKS if "save as own_loop.py" in block.text)
    lines = []
    for parts in (["3"], ["1", "3"]):
        shutil.rmtree(folder / "runs" / "rl", ignore_errors=True)
        finished = [run_python(["-c", block.text, steps], folder) for steps in parts]
        assert [done.returncode for done in finished] == [0] * len(parts), finished[-1].stderr[-2000:]
        lines.append([line for done in finished for line in done.stdout.splitlines() if "loss" in line])
    assert lines[0] == lines[1] and len(set(lines[0])) == 3


def make_demo_hf(folder: Path) -> None:
    if not (folder / "demo-hf").exists():
        run_python(["-c", NEMOTRON3, *shlex.split(table.COMMANDS["convert to-hf"].example)[1:]], folder)


def prepare_conversion(command: table.Command, folder: Path) -> None:
    """What its example reads is there, and what it writes is not: other tests run the same examples."""
    written = {"convert to-hf": "demo-hf", "convert from-hf": "demo-megatron"}.get(command.name)
    if written:
        shutil.rmtree(folder / written, ignore_errors=True)
    if command.name.startswith("convert ") and written != "demo-hf":
        make_demo_hf(folder)


def write_chat_model(folder: Path) -> None:
    """Conversations, and a Hugging Face folder whose tokenizer has a chat template."""
    run_python([str(ROOT / "examples" / "conversations.py"), "."], folder)
    make_demo_hf(folder)
    (tokenizer,) = (folder / "runs" / "demo" / "data").glob("*/tokenizer")
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / "demo-hf")
    shutil.copy(folder / "template.jinja", folder / "demo-hf" / "chat_template.jinja")


@pytest.mark.full
@pytest.mark.parametrize("command", EXAMPLES.values(), ids=list(EXAMPLES))
def test_example(command: table.Command, page_folder: Callable[[str], Path], programs: Path) -> None:
    """The example of each command in `nemotron3 --help` runs, in the order of the help."""
    folder = page_folder("examples of commands")
    (folder / "pretrain_hybrid.py").write_text("import sys; assert '--spec' in sys.argv\n")
    prepare_conversion(command, folder)
    if command.name == "finetune":
        write_chat_model(folder)
    if command.name == "bisect":
        run_python([str(ROOT / "examples" / "recordings.py"), "runs/demo"], folder)
    if command.name in ("run", "chat"):  # the words in ARGS; chat reads stdin to its end
        script = f"ARGS=(--spec megatron_nemotron3.specs nemotron3_stack_spec); {command.example} </dev/null"
        done = run(["bash", "-euo", "pipefail", "-c", script], folder, programs)
    else:
        done = run_python(["-c", NEMOTRON3, *shlex.split(command.example)[1:]], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("command", REPORTING)
def test_json(command: table.Command, page_folder: Callable[[str], Path]) -> None:
    """With --json the example prints one JSON document, and nothing else on stdout."""
    folder, words = page_folder("examples of commands"), shlex.split(command.example)[1:]
    prepare_conversion(command, folder)
    done = run_python(["-c", NEMOTRON3, *words, "--json"], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    document = json.loads(done.stdout, parse_constant=_no_json)
    assert isinstance(document, (dict, list)) and document


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_tried_or_says_why_not(page: str) -> None:
    """A mark is `full`, or a reason; no command hides in an indented block."""
    for block in blocks(page):
        assert block.mark in ("", "full") or len(block.mark) > len("not run: "), (page, block.line)
    text = (ROOT / page).read_text(encoding="utf-8")
    outside = "".join(text.split("```")[::2])
    assert [line for line in outside.splitlines() if line.startswith("    ")] == []
