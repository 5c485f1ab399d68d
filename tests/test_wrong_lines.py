"""Command lines of clumsy and hostile users: each ends with status 2 and says why, and writes nothing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron_nemotron3 import cli

#: Command -> what follows it. dir, file.txt, empty.json and pipe (a FIFO) exist.
LINES: dict[str, tuple[str, ...]] = {
    "show": (
        "", '""', "../nano", "empty.json", "--model", "--model pipe", "-- nano", "💥",
    ),
    "flags": (
        "nano --tp -1", "nano --tp 1.5", "nano --tp 99999999999999", "nano --pp 53", "nano --lr nan",
        "nano --lr -1", "nano --steps 0", "nano --seq-length 7 --tp 2", "nano --global-batch-size 3 --dp 2",
        "nano --precision fp8", "nano --precision nvfp4 --te-precision-config-file pipe",
        "nano --precision nvfp4 --te-precision-config-file empty.json", "nano --emulate",
        "nano --megatron-core x", "nano --schedule sft", "nano -- --", "nano -- --=", "nano -- -lr 1",
        "nano -- --lr=", 'nano -- --lr ""', "nano -- --seed 1e9", "nano -- --fp16",
        "nano -- --num-layers 3", 'nano -- "--lr 1"', "nano --shell --environment --gpu h100",
    ),
    "explain": (
        "nano --argv nope", "nano --argv pipe", "nano --argv empty.json", "nano --argv /dev/zero",
        "nano --schedule long-context", "nano --argv /bin/ls", "nano --trust-script",
        "nano --argv q.json --set A=1 --set A=2",
    ),
    "precision": (
        "", "--report nope", "--report pipe", "nano --format fp9", "nano --output dir",
        "nano --output /proc/x", "nano --te-precision-config-file nope",
        "nano --te-precision-config-file empty.json", "nano --output q.json",
    ),
    "plan": (
        "nano", "nano --gpus 0 --gpu h100", "nano --gpus 8 --gpu x", "nano --gpus 8 --gpu h100 --best 0",
        "nano --gpus 8 --gpu h100 --gbs -3", "q.json --gpus 1 --gpu h100 --plot dir",
        'nano --gpus 8 --gpu h100 --plot ""',
    ),
    "report monitors": (
        "", "dir", "file.txt", "pipe", "/dev/zero", '""',
    ),
    "check": (
        "", "dir", "file.txt", "pipe", "/dev/null", ".",
    ),
    "convert": (
        "", "x", "to-hf a", "to-hf nope out", "to-hf dir out", "to-hf file.txt out", "from-hf dir out",
        "to-hf dir out --model q.json", "to-hf dir out --workers 0", "to-hf . out",
        "from-hf dir dir/x --model empty.json",
    ),
    "convert verify": (
        "", "dir", "file.txt", "pipe", "dir --model super --tiny", "dir --vocab-size 0", "dir dir",
        "q.json --dequantize",
    ),
    "plan refit": (
        "", "super", "super --from tp=2", "super --from tp=0 --to tp=2", "super --from tp=2,tp=2 --to tp=1",
        "super --from tp=999999999 --to tp=1", "super --from tp=3 --to tp=1",
        "super --from tp=2 --to tp=2,ep=3", "super --from tp=2 --to tp=2 --buffer 0",
        "super --from tp=2 --to tp=2 --delta nope",
    ),
    "bisect": (
        "", "dir --trainer nope --engine nope",
        "dir --trainer file.txt --engine file.txt",
        "dir --trainer file.txt --engine file.txt --first 0",
        "dir --trainer file.txt --engine file.txt --tiny",
        "dir --trainer file.txt --engine q.json --previous dir --no-cause",
    ),
    "plan boundary": (
        "", "--from tp=2", "--from tp=x --to tp=1", "--from tp=2 --to tp=2 --rows -1", '--from "" --to ""',
        "--from tp=2 --to tp=2 --plot dir", "--from tp=999999999 --to tp=1",
        "--from tp=2 --to tp=2 --samples 0",
    ),
    "generate": (
        "", "nope --prompt x", "pipe --prompt x", 'dir --prompt ""',
        "dir --prompt x --max-new-tokens 0", "dir --prompt-file pipe",
        "dir --prompt x --model empty.json", "dir --prompt x --draft -1",
        "dir --prompt x --seed 5", "dir --prompt x --temperature 1 --seed 99999999999999999999",
    ),
    "evaluate": (
        "", "nope", "pipe", "dir --tokens 0",
        "dir --text nope",
    ),
    "distill projection": (
        "", "nope nope", "dir pipe", "dir dir --output dir", "dir dir --width 0",
        "dir dir --projection nope --width 2",
    ),
    "certify": (
        "nano --tiny --trust-script", "nano --tiny --set A=1",
    ),
    "doctor": (
        "x", "--step nope", "--step empty.json",
    ),
    "train": (
        "", "nano", "nano --tiny --steps 0", "nano --tiny --lr -1", "nano --tiny --output file.txt",
        "nano --tiny --text nope", "nano-4b --steps 3", "nano --tiny --output pipe",
        "nano --tiny --output /proc/x", "empty.json", "nano --tiny --lr inf", "nano --tiny --lr nan",
        "nano --tiny --steps 99999999999999999999", "nano --tiny --seq-length 99999999999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", LINES)
def test_a_wrong_command_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    for name in ("file.txt", "empty.json"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "q.json").write_text('{"base": "nano-tiny", "name": "q"}')
    wrong = []
    for line in LINES[command]:
        try:
            status = cli.main([*command.split(), *shlex.split(line)])
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        if status != 2 or not said.err.strip() or "Traceback" in said.err or said.out:
            wrong.append((line, status, said.err[-300:]))
    assert not wrong
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["dir", "empty.json", "file.txt", "pipe", "q.json"]
