"""--config: options of a command in a YAML file, which never runs, hangs or grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common.config_file import FILE, config_text

Capture = pytest.CaptureFixture[str]


def parsed(*words: str) -> dict[str, object]:
    return vars(cli.parser(["train"]).parse_args(["train", *words]))


def test_the_command_line_counts_before_the_file_and_the_written_file_repeats_it(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: nano\ntiny: true\nlr: 5e-5\nsteps: 7\nseq_length: 64\nisolate-documents: false\n"
        "teacher: [a, b]\nlog-precision: true\nmean: null\ndata-path: [0.5, x, 0.5, 'y z']\n"
        "tensorboard: false\nmegatron: [--num-workers, 2]\n"
    )
    found = parsed("--config", str(file), "--steps", "9", "--teacher", "c")
    expected = {"name": "nano", "tiny": True, "lr": 5e-5, "steps": 9, "seq_length": 64, "mean": None}
    expected |= {
        "tensorboard": None,
        "isolate_documents": False,
        "teacher": ["c"],
        "log_precision": "",
        "tp": None,
    }
    expected |= {"data_path": ["0.5", "x", "0.5", "y z"], "extra": ["--num-workers", "2"]}
    assert expected.items() <= found.items()
    assert parsed("--config", str(file))["teacher"] == ["a", "b"]
    (tmp_path / FILE).write_text(config_text(tmp_path, found["given"], found["extra"], "train"))  # type: ignore[arg-type]
    again = parsed("--config", str(tmp_path / FILE))
    differ = {name for name in found if found[name] != again[name]}
    assert differ == {"config"}
    assert parsed("nano")["steps"] is None  # the parser keeps nothing of a file


def test_a_file_that_is_missing(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        parsed("--config", str(tmp_path / "none.yaml"))
    assert f"--config {tmp_path}/none.yaml: No such file" in capsys.readouterr().err


def test_two_files_are_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--config", "a.yaml", "--steps", "1", "--config=b.yaml")
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("--config is given 2 times (a.yaml, b.yaml): give one file\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nstpes: 2\n", ":2: unknown option stpes; did you mean 'steps'?"),
        ("steps: 1\nlr: fast\n", ":2: lr: invalid float value: 'fast'"),
        ("steps: 1\nsteps: 2\n", ":2: steps is given twice"),
        ("tiny: 3\n", ":1: tiny: '3': give true or false"),
        ("steps: [1, 2]\n", ":1: steps: ['1', '2']: give one value"),
        ("mean: token\n", ":1: mean: invalid choice: 'token'"),
        ("steps: {a: 1}\n", ":1: give OPTION: VALUE"),
        ("- steps\n", ":1: give OPTION: VALUE"),
        ("steps: &a 1\nlr: *a\n", ":1: anchors and aliases are not read"),
        ("text: " + "[" * 20000, ":1: give OPTION: VALUE"),
        ("steps: 1\n\tlr: [\n", ":2: it is not YAML"),
        ("text: !!python/object/apply:os.system [touch ran]\nx: 1\n", "give one value"),
        ("# " + "a" * 70000, "longer than 65,536 bytes"),
        ("config: b.yaml\n", ":1: unknown option config"),
        ("trust-checkpoint: true\n", ":1: trust-checkpoint is read from the command line only"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        parsed("--config", str(file))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and str(file) in line
    assert not Path("ran").exists()
