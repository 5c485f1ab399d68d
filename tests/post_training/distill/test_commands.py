"""A teacher, its stored logits and two students, by the commands of a user."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.folders import TRACKER, latest_iteration
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.post_training.distill.stored import Reader
from megatron_nemotron3.train import log, processes
from megatron_nemotron3.train.teacher.settings import part_path, read_manifest
from tests.support.generation_folders import make
from tests.train.data.test_conversations import THINKING, say, write_lines

Capture = pytest.CaptureFixture[str]

SAMPLES = 80  # two parts of at most 64 rows


def nemotron3(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_nemotron3", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_until(true: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def interrupted(output: Path, *words: str) -> int:
    """Start a run, and stop it by Ctrl-C after its first save; the step that it saved last."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_nemotron3", *words], stdout=subprocess.PIPE, text=True
    )
    wait_until((output / "checkpoints" / TRACKER).is_file, seconds=240)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 130 and "interrupted: " in said
    step = latest_iteration(output / "checkpoints")
    assert step is not None
    return step


def train(model: str, text: str, output: Path, *words: str) -> log.LogStep:
    """The first step of a run of two."""
    given = ["--steps", "2", "--seq-length", "64", "--text", text, "--output", str(output)]
    nemotron3("train", model, "--tiny", "--device", "cpu", *given, *words, "--", "--log-interval", "1")
    return log.read(str(output / "train.log")).steps[1]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    line = '{"text": "%s"}\n'
    words = [" ".join(f"{i * j % 97} apples and {j} pears," for j in range(60)) for i in range(200)]
    file.write_text("".join(line % one for one in words))
    return str(file)


@pytest.fixture(scope="module")
def teacher(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train("super", text, folder)
    return folder


@pytest.fixture(scope="module")
def stored(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logits") / "all"
    store(teacher, folder)
    return folder


def store(teacher: Path, folder: Path, *words: str, code: int = 0) -> str:
    given = ["--samples", str(SAMPLES), "--topk", "40", "--seq-length", "64", "--device", "cpu"]
    return nemotron3("distill", "logits", str(teacher), "--output", str(folder), *given, *words, code=code)


@pytest.mark.full
def test_both_teach_the_same(text: str, teacher: Path, stored: Path, tmp_path: Path) -> None:
    """The divergence of the first step, from the whole vocabulary and from 40 + 32 tokens of it."""
    online = train("nano", text, tmp_path / "online", "--teacher", str(teacher))
    offline = train("nano", text, tmp_path / "offline", "--teacher", str(stored))
    plain = train("nano", text, tmp_path / "plain")
    assert online.loss == pytest.approx(plain.loss, rel=1e-6), "lm loss is the student's cross-entropy"
    assert offline.loss == pytest.approx(plain.loss, rel=1e-6)
    assert "divergence" not in plain.values
    assert offline.values["divergence"] == pytest.approx(online.values["divergence"], rel=0.02)
    assert online.values["grad norm"] != pytest.approx(plain.values["grad norm"], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2"), ("--cp", "2"), ("--dp", "2", "--ep", "2")])
def test_any_layout_stores_the_same(
    teacher: Path, stored: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    store(teacher, tmp_path / "logits", *layout)
    one, other = Reader(stored), Reader(tmp_path / "logits")
    assert one.manifest == other.manifest
    for table, again in zip(one._tables, other._tables, strict=True):
        assert (table["key"] == again["key"]).all()
        np.testing.assert_allclose(table["log_p"][..., :40], again["log_p"][..., :40], rtol=0, atol=1e-4)
        np.testing.assert_allclose(table["log_p"][..., -1], again["log_p"][..., -1], rtol=0, atol=1e-4)
        same = table["ids"] == again["ids"]  # of tokens of almost equal probability another may stand there
        assert same[..., :40].mean() > 0.99 and same[..., 40:].mean() > 0.99
        drawn = np.abs(table["log_p"] - again["log_p"])[..., 40:-1]
        assert drawn[same[..., 40:]].max() < 1e-4


@pytest.mark.full
def test_a_hugging_face_folder_stores_the_same(teacher: Path, stored: Path, tmp_path: Path) -> None:
    """And a student learns from it; its data are not in the folder, so they are given.

    The embedding is padded, and only a tokenizer in the folder says to what.
    """
    hf, (corpus,) = str(tmp_path / "hf"), teacher.glob("data/*/corpus.idx")
    nemotron3("convert", "to-hf", str(teacher), hf)
    Path(hf, "tokenizer.json").unlink()
    tokenizer = corpus.with_name("tokenizer")
    data = ("--data-path", str(corpus.with_suffix("")), "--tokenizer", str(tokenizer))
    given = (*data, "--split", read_manifest(stored).source["split"])
    assert "copy its tokenizer.json there" in store(Path(hf), tmp_path / "logits", *given, code=2)
    shutil.copy(tokenizer / "tokenizer.json", hf)
    store(Path(hf), tmp_path / "logits", *given)
    for table, again in zip(Reader(stored)._tables, Reader(tmp_path / "logits")._tables, strict=True):
        assert (table == again).all()
    given = ("--device", "cpu", "--steps", "1", "--seq-length", "64", "--output", str(tmp_path / "run"))
    nemotron3("train", "nano", "--tiny", *given, *data, "--teacher", hf)
    (step,) = log.read(str(tmp_path / "run" / "train.log")).steps.values()
    assert step.values["divergence"] > 0


@pytest.mark.full
def test_goes_on_where_it_ended(teacher: Path, stored: Path) -> None:
    manifest = read_manifest(stored)
    first, second = (part_path(stored, part) for part in manifest.parts())
    before, kept = second.read_bytes(), first.stat().st_mtime_ns
    assert sum(path.stat().st_size for path in (first, second)) < manifest.size + 1024
    second.unlink()
    assert "1 of 2 parts are missing" in nemotron3(
        *("train", "nano", "--tiny", "--device", "cpu", "--steps", "2", "--seq-length", "64"),
        *("--teacher", str(stored), "--output", str(stored.parent / "student")),
        code=2,
    )
    store(teacher, stored)
    assert second.read_bytes() == before and first.stat().st_mtime_ns == kept
    said = store(teacher, stored, "--logit-temperature", "2", code=2)
    assert "holds other logits (temperature 1.0, not 2.0)" in said


@pytest.mark.full
def test_interrupted_and_gone_on(text: str, teacher: Path, tmp_path: Path, capsys: Capture) -> None:
    """Ctrl-C after the first save; then only the same teacher and loss go on, or those that are asked for."""
    output, other, moved = (tmp_path / name for name in ("student", "other", "moved"))
    train("super", text, other, "--lr", "1e-3")
    shutil.copytree(teacher, moved)
    given = ["train", "nano", "--tiny", "--device", "cpu", "--steps", "40", "--seq-length", "64"]
    given += ["--text", text, "--output", str(output)]
    megatron = ["--", "--log-interval", "1", "--save-interval", "2"]
    step = interrupted(output, *given, "--teacher", str(teacher), *megatron)
    assert 2 <= step < 40
    before = (output / "run.json").read_bytes()
    capsys.readouterr()
    assert cli.main([*given, "--teacher", str(other), *megatron]) == 2
    found = capsys.readouterr().err
    assert f"with teacher {teacher}, not {other} (weights iter_0000002 " in found
    assert "give --change teacher if that is meant" in found
    assert (output / "run.json").read_bytes() == before
    assert latest_iteration(output / "checkpoints") == step
    end = ["--steps", str(step + 2)]
    nemotron3(*given, *end, "--teacher", str(moved), *megatron)
    end = ["--steps", str(step + 4)]
    found = nemotron3(*given, *end, "--teacher", str(other), "--change", "teacher", *megatron)
    assert f"teacher changes at step {step + 2}: weights " in found
    assert latest_iteration(output / "checkpoints") == step + 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a small model; its text is beside it."""
    return make(tmp_path_factory.mktemp("small"), pytest.MonkeyPatch()).run


@pytest.fixture
def logits(small: Path, tmp_path: Path) -> list[str]:
    """Words of `nemotron3 distill logits` for two parts of a small model, into `tmp_path / "logits"`."""
    given = ["--samples", str(SAMPLES), "--topk", "4", "--seq-length", "64", "--device", "cpu"]
    return ["distill", "logits", str(small), "--output", str(tmp_path / "logits"), *given]


def test_a_folder_that_is_not_free(logits: list[str], tmp_path: Path, capsys: Capture) -> None:
    """Another process writes there, or it holds something else, such as the teacher's own run."""
    output = tmp_path / "logits"
    with lock.held(output, "another command"):
        assert cli.main(logits) == 2
        assert "another command (wait for it, or choose another folder)" in capsys.readouterr().err
    assert not output.exists()
    assert cli.main([*logits, "--output", logits[2]]) == 2
    assert "exists and holds no stored logits: give a new --output" in capsys.readouterr().err
    assert not (Path(logits[2]) / "manifest.json").exists()


@pytest.mark.parametrize(("number", "split"), [(3, "100,0,0"), (400, "90,10,0")])
def test_conversations_are_divided_as_in_training(
    number: int,
    split: str,
    logits: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """The training set of three rows is all of them, and the same command goes on with it."""
    tokenizer = shutil.copytree(next(Path(logits[2]).glob("data/*/tokenizer")), tmp_path / "tokenizer")
    told = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": THINKING}))
    chats = [{"messages": [say("user", f"{i}?"), say("assistant", "apples " * 8)]} for i in range(number)]
    file = write_lines(tmp_path / "chats.jsonl", chats)
    given = [*logits, "--conversations", str(file), "--tokenizer", str(tokenizer), "--seq-length", "256"]
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "follow", lambda words, *_: started.append(words) or 1)
    for _ in range(2):
        assert cli.main(given) == 2
        assert "the processes ended with 1" in capsys.readouterr().err
    assert [words[words.index("--split") + 1] for words in started] == [split] * 2
    assert read_manifest(tmp_path / "logits").source["split"] == split


def test_an_interrupt(
    logits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It ends the processes, says what there is, and the next start removes a part that was being written."""
    output = tmp_path / "logits"
    half = output / ".part-00000000.npy.part-1234"

    def stopped(_words: object, _env: object, _log: object, watcher: processes.Watcher) -> int:
        assert lock.holder(output) is not None and not half.exists()
        watcher.line("1 of 2 parts\n")
        half.touch()
        part_path(output, read_manifest(output).parts()[1]).touch()
        assert watcher.interrupted() is False
        return 1

    monkeypatch.setattr(processes, "follow", stopped)
    for _ in range(2):
        assert cli.main(logits) == 130
        assert "interrupted: 1 of 2 parts are stored; the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(processes, "follow", lambda *_: 1)
    assert cli.main(logits) == 2
    assert "the processes ended with 1; the parts that are written stay" in capsys.readouterr().err


def test_a_projection_that_is_missing(logits: list[str], tmp_path: Path, capsys: Capture) -> None:
    text, student = Path(logits[2]).with_name("text.txt"), tmp_path / "student"
    words = ["--device", "cpu", "--text", str(text), "--output", str(student)]
    words += ["--teacher", logits[2], "--distill", f"projection={tmp_path}/none"]
    assert cli.main(["train", "nano", "--tiny", *words]) == 2
    said = capsys.readouterr().err
    assert "/none is no file: nemotron3 distill projection STUDENT_TOKENIZER " in said
    assert "--output FILE" in said
    assert not student.exists()


@pytest.mark.full
def test_a_model_learns_from_itself(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher has the weights before packing: without packing there is nothing to learn, with it there
    is. What was trained is packed with the same recipe, and comes back.

    Megatron sorts a token's experts only with gradients, which the teacher has not: their scores are added in
    another order, and an expert's weight can differ by a rounding, of FP32 here. The divergence is of second
    order in it."""
    base, plain, packed = (tmp_path / name for name in ("base", "plain", "packed"))
    train("super", text, base, "--precision", "bf16")
    itself = ("--pretrained", str(base), "--teacher", str(base))
    assert train("super", text, plain, *itself).values["divergence"] < 1e-9
    monkeypatch.setenv(EMULATE, "super-nvfp4")
    first = train("super", text, packed, *itself, "--emulate")
    assert 1e-5 < first.values["divergence"] < 0.1
    assert "have the weights of super-nvfp4" in (packed / "train.log").read_text()
    assert not (packed / "precision.yaml").exists()
    monkeypatch.delenv(EMULATE)
    hf, back = str(tmp_path / "hf"), str(tmp_path / "back")
    nemotron3("convert", "to-hf", str(packed / "checkpoints"), hf, "--quantize", "super-nvfp4")
    stated = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == "modelopt"
    nemotron3("convert", "from-hf", hf, back, "--dequantize")
