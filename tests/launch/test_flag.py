"""Writing flags down and reading them back, through a real shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import (
    Flag,
    Launch,
    ParallelLayout,
    TrainingData,
    flags,
    published,
    render,
    to_argv,
)
from megatron_nemotron3.launch.flag import SECTIONS, parse

SHOW = 'exec {python} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "{words}"'


def launch_flags() -> list[Flag]:
    """A launch with everything a shell could spoil: globs, pipes, slashes, quotes, spaces, dollars."""
    return flags(
        Launch.of(
            models.SUPER,
            ParallelLayout(pp=4),
            schedule=published(models.SUPER),
            data=TrainingData(
                data_path=("0.7", "/data/a b", "0.3", "$HOME/it's"), save="/run/*", tokenizer_model="~/t`x`"
            ),
            extra=("--wandb-project", 'say "hi" & go; #1', "--wandb-entity", ""),
        )
    )


def through_shell(shell: str, script: str, folder: Path) -> list[str]:
    """Run a script that ends in printing its words; in a folder whose file names match the globs."""
    for name in ("MEMEM", "MEMEMEMXE", "run"):
        (folder / name).touch()
    done = subprocess.run([shell, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    words: list[str] = json.loads(done.stdout)
    return words


def show(words: str) -> str:
    return SHOW.format(python=sys.executable, words=words)


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("bash", 'flags=$(cat flags) || exit 1\neval "ARGS=( $flags )"\n' + show("${ARGS[@]}")),
        ("sh", 'flags=$(cat flags) || exit 1\neval "set -- $flags"\n' + show("$@")),
    ],
    ids=["array", "posix"],
)
def test_shell_round_trip(shell: str, script: str, tmp_path: Path) -> None:
    launch = launch_flags()
    (tmp_path / "flags").write_text(render(launch, shell=True) + "\n")
    assert through_shell(shell, script, tmp_path) == to_argv(launch)


def test_text_is_one_option_a_line_by_section() -> None:
    launch = launch_flags()
    lines = render(launch).splitlines()
    headings = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    assert headings == [section for section in SECTIONS if any(f.section == section for f in launch)]
    assert [line for line in lines if not line.startswith("# ")] == [str(flag) for flag in launch]


def test_parse() -> None:
    assert [(flag.name, flag.values) for flag in parse(["--a", "1", "-2", "--b", "--c=x=y"])] == [
        ("--a", ("1", "-2")),
        ("--b", ()),
        ("--c", ("x=y",)),
    ]
    assert to_argv(parse(to_argv(launch_flags()))) == to_argv(launch_flags())
    with pytest.raises(ValueError, match="'5', which belongs to no option"):
        parse(["5", "--a"])


def test_flag_refuses_what_it_cannot_write() -> None:
    with pytest.raises(ValueError, match="must start with '--'"):
        Flag("lr", ("1",))
    with pytest.raises(ValueError, match="line break"):
        Flag("--lr", ("1\n2",))
    with pytest.raises(ValueError, match="section 'model'"):
        Flag("--lr", ("1",), "model")
