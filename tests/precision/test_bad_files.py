"""Every bad precision file gets a message with the cure from every command that is told of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import megatron_nemotron3 as n3
from megatron_nemotron3 import cli, models
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.run import main as launch

TINY = models.tiny(models.get("super"))
GOOD = yaml_file.render(TINY)
QKV = '"*.linear_qkv"'


def swapped(old: str, new: str) -> str:
    assert old in GOOD, old
    return GOOD.replace(old, new, 1)


#: Text of the file -> what every message must say. Those of `EVERY_MODEL` are wrong for any model.
EVERY_MODEL: dict[str, tuple[str, str]] = {
    "empty": ("", "empty, so not a mapping .*nemotron3 precision (NAME|super-tiny) --output FILE writes"),
    "comments only": ("# nothing yet\n", "empty, so not a mapping"),
    "null": ("null\n", "empty, so not a mapping"),
    "document end": ("---\n...\n", "empty, so not a mapping"),
    "a list": ("- configs\n- matchers\n", r"\['configs', 'matchers'\] is not a mapping"),
    "a word": ("nvfp4\n", "'nvfp4' is not a mapping"),
    "two documents": ("a: 1\n---\nb: 2\n", "not YAML: expected a single document"),
    "not YAML": ("configs: {\n", "not YAML: "),
    "tab": ("configs:\n\tbf16: {}\n", "not YAML: .*cannot start any token"),
    "a Python object": (
        "!!python/object/apply:os.getcwd []\n",
        "not YAML: could not determine a constructor",
    ),
    "a date that is none": (swapped(QKV, "2026-99-99"), "not YAML: month must be in 1..12"),
    "nested": ("[" * 5000, "nested too deeply"),
    "aliases": (
        "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nconfigs: *b\nmatchers: {}\n",
        r"configs: \[\[1, 1, 1, .*\.\.\.\] is not a mapping",
    ),
    "matchers misspelt": (swapped("matchers:", "matcher:"), "'matcher'; did you mean 'matchers'"),
    "configs misspelt": (swapped("configs:", "config:"), "'config'; did you mean 'configs'"),
    "unknown part": (GOOD + "defaults: {}\n", "unknown key 'defaults'; known are configs, matchers"),
    "no matchers": (GOOD[: GOOD.index("# The first")], "no matchers"),
    "matchers empty": (GOOD[: GOOD.index("matchers:")] + "matchers:\n", "matchers: None is not a mapping"),
    "matchers none": (GOOD[: GOOD.index("matchers:")] + "matchers: {}\n", "the file would do nothing"),
    "matchers a list": (GOOD[: GOOD.index("matchers:")] + "matchers: [mtp]\n", "is not a mapping"),
    "a matcher empty": (GOOD + "  more:\n", "matchers.more: None is not a mapping"),
    "pattern misspelt": (swapped("pattern:", "patern:"), "'patern'; did you mean 'pattern'"),
    "type misspelt": (swapped("    type:", "    typ:"), "'typ'; did you mean 'type'"),
    "enabled misspelt": (swapped("    enabled:", "    enable:"), "'enable'; did you mean 'enabled'"),
    "config key misspelt": (swapped('    config: "', '    confg: "'), "'confg'; did you mean 'config'"),
    "no such config": (
        swapped('config: "bf16"', 'config: "bf61"'),
        "'bf61' is none of .*did you mean 'bf16'",
    ),
    "config no text": (swapped('config: "bf16"', "config: [bf16]"), r"\['bf16'\] is none of bf16, mxfp8"),
    "config misnamed": (swapped("  bf16:\n", "  bf6:\n"), "'bf16' is none of bf6, mxfp8; did you mean 'bf6'"),
    "training recipe misspelt": (
        swapped("training_recipe", "trainig_recipe"),
        "'trainig_recipe'; did you mean 'training_recipe'",
    ),
    "field misspelt": (swapped("fp8_quantization", "fp8_quantisation"), "mean 'fp8_quantization_recipe'"),
    "no such format": (
        swapped('"mxfp8"}', '"mxfp4"}'),
        "'mxfp4' is unknown: use mxfp8.*did you mean 'mxfp8'",
    ),
    "format no text": (swapped('"mxfp8"}', "8}"), "8 is unknown: use mxfp8"),
    "no kind of config": (
        swapped("transformer_engine_config_type", "config_type"),
        "unknown key 'config_type'",
    ),
    "another kind": (swapped("TEQuantizationParams", "QLinearParams"), "use TEQuantizationParams"),
    "a regular expression": (swapped(QKV, '".*linear_(qkv|proj)$"'), r"no module name contains '\$', '\('"),
    "a space": (swapped(QKV, '" *.linear_qkv"'), "no module name contains ' '"),
    "a bracket": (swapped("fc[12]", "fc[12"), "a bracket that is not closed"),
    "pattern empty": (swapped(QKV, '""'), 'is empty: "\\*" stands for all linears'),
    "pattern no text": (swapped(QKV, "[a]"), r"\['a'\] is not text"),
    "disabled by text": (
        swapped("    enabled: true", "    enabled: 'on'"),
        "enabled: 'on': write enabled: true",
    ),
    "control characters": (GOOD + '  "a\\eb": 3\n', r"matchers\.'a\\x1bb': 3 is not a mapping"),
}
#: These are wrong for the model, which a script's launcher does not know before it builds.
THIS_MODEL: dict[str, tuple[str, str]] = {
    "pattern of nothing": (
        swapped(QKV, '"*.linear_kqv"'),
        r"matches no linear .*did you mean '\*.*linear_qkv'",
    ),
    "two kinds": (swapped("*mixer.out_proj", "*linear_fc2"), "2 kinds: experts .*one matcher for each"),
    "nothing left": (
        GOOD + '  rest:\n    config: "bf16"\n    type: "glob"\n    pattern: "*"\n    enabled: true\n',
        "none of the model's .* linears is nvfp4",
    ),
}
FLAGS = ["super", "--tiny", "--precision", "nvfp4"]
EMULATE = [*FLAGS, "--backend", "torch", "--emulate"]


def command(*words: str) -> Callable[[str], int | None]:
    return lambda file: cli.main([*words, "--te-precision-config-file", file])


def run(file: str) -> int | None:
    launch(["--device", "cpu", __file__, "--te-precision-config-file", file])
    return 0


def build(file: str) -> int | None:
    """Exit status 2 stands for a ValueError, whose message goes where a command prints it."""
    import sys

    try:
        with n3.cpu_mode():
            n3.build_model(
                "super",
                tiny=True,
                precision="nvfp4",
                backend="torch",
                emulate=True,
                te_precision_config_file=file,
            )
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


COMMANDS: dict[str, Callable[[str], int | None]] = {
    "flags": command("flags", *FLAGS, "--backend", "te"),
    "flags --emulate": command("flags", *EMULATE),
    "flags, as an extra": lambda file: cli.main(
        ["flags", *FLAGS, "--backend", "te", "--", "--te-precision-config-file", file]
    ),
    "flags in bf16": lambda file: cli.main(
        ["flags", "super", "--tiny", "--backend", "te", "--", "--te-precision-config-file", file]
    ),
    "explain": command("explain", *FLAGS, "--backend", "te"),
    "train": command("train", *EMULATE, "--device", "cpu"),
    "precision": command("precision", "super", "--tiny"),
    "run": run,
    "build_model": build,
}


#: The commands that the short tests try with every file; the others get a few.
QUICK = ("flags", "precision", "run")


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, False) for name in COMMANDS if name not in QUICK),
        *(pytest.param(name, True, marks=[] if name in QUICK else pytest.mark.full) for name in COMMANDS),
    ],
)
def test_every_command_says_what_is_wrong(
    name: str,
    every: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line for each mistake, exit status 2, and nothing written."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bad.yaml"
    cases = {**EVERY_MODEL, **({} if name == "run" else THIS_MODEL)}
    if name == "flags in bf16":
        cases.pop("nothing left")  # there is nothing to lose
    assert len(cases) >= 40
    wanted = cases if every else ("empty", "no such config", "a matcher empty")
    for case in wanted:
        text, message = cases[case]
        file.write_text(text)
        try:
            status = COMMANDS[name](str(file))
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        assert status == 2, (case, said)
        assert re.search(message, said.err), (case, said.err)
        assert "Traceback" not in said.err and len(said.err.splitlines()) < 10, (case, said.err)
        assert os.listdir(tmp_path) == ["bad.yaml"], case


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe without a writer, a device without an end and a folder: refused at once."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for place, message in (
        (tmp_path / "pipe", "a pipe"),
        (Path("/dev/zero"), "a character device"),
        (tmp_path / "folder", "[Ff]older|directory"),
    ):
        try:
            status = COMMANDS[name](str(place))
        except SystemExit as end:
            status = int(end.code or 0)
        except OSError as problem:  # from Python
            assert name == "build_model"
            assert re.search(message, str(problem))
            continue
        assert status == 2 and re.search(message, capsys.readouterr().err)
