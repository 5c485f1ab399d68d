"""`nemotron3 train boost`: measure, train, measure; a start after an interrupt; what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.folders import TRACKER
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.switches import BOOST
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.post_training import measure
from megatron_nemotron3.post_training.boost import command as boost_command
from megatron_nemotron3.post_training.boost import inputs as boost_inputs
from megatron_nemotron3.train import processes
from tests.support.engines import agreeing_tensors
from tests.support.generation_folders import Folders, make, small_config
from tests.support.hf_folders import write_hf
from tests.support.programs import follow_forked

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    monkeypatch = pytest.MonkeyPatch()
    yield make(tmp_path_factory.mktemp("boost"), monkeypatch)
    monkeypatch.undo()


def words(folders: Folders, out: Path, *more: object, source: Path | None = None) -> list[str]:
    """A command that needs no more options; the model is no tiny one of the catalog."""
    given = ["train", "boost", source or folders.run, "--output", out, "--device", "cpu", "--depths", 3]
    given += ["--steps", 4, "--lr", 1e-2, "--seq-length", 64]
    given += ["--micro-batch-size", 1, "--global-batch-size", 4]
    return [str(word) for word in (*given, *more)]


def untrained(stopped: list[int]) -> Callable[..., int]:
    """The steps, but training copies its start; it is interrupted as often as `stopped` has statuses."""

    def step(main: object, *given: object, prefix: str = "") -> int:
        line = [str(word) for word in given]
        if line[0] != "train":
            return cli.main(line)
        options = cli.parser(["train"]).parse_args(line[: line.index("--")])
        assert options.steps == 4 and Path(options.tokenizer).is_absolute() and f"{BOOST}=" in prefix
        assert os.environ[BOOST] == "loss=kl,temperature=1.0,mix=1.0,decay=1.0,seed=1234"
        if stopped:
            return stopped.pop()
        shutil.copytree(options.pretrained, options.output / "checkpoints")
        return 0

    return step


@pytest.mark.full
def test_measured_before_and_after(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Training that changes nothing changes no figure; a second call goes on after an interrupt."""
    monkeypatch.setattr(measure, "TOKENS", 2048)
    line = words(folders, tmp_path / "out")
    with lock.held(tmp_path / ".out.part", "the other one"):  # which writes the first files
        assert cli.main(line) == 2
    monkeypatch.setattr(boost_command, "step", untrained([130]))
    with chdir(folders.run.parent):
        assert cli.main(["train", "boost", folders.run.name, *line[3:]]) == 130
    with lock.held(tmp_path / "out", "the other one"):
        assert cli.main(line) == 2
    assert "the other one (wait for it, or choose another folder)" in capsys.readouterr().err
    before = (tmp_path / "out/before.json").read_bytes()
    assert json.loads((tmp_path / "out/model.json").read_text())["config"]["mtp_num_layers"] == 3
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "out/after.json").read_bytes() == before
    assert "  3 drafted   " in out and "+0.000 ± 0.000" in out
    assert BOOST not in os.environ
    for other in (["--mix", "0"], ["--seq-length", "32"]):
        assert cli.main([*line, *other]) == 2
        name = "boost" if other[0] == "--mix" else "seq_length"
        assert f"holds a boost with another {name}" in capsys.readouterr().err
    # Figures are kept for one checkpoint: a run that was trained further is measured again.
    kept = json.loads(before)
    (tmp_path / "out/after.json").write_text(json.dumps(kept | {"accepted": [7.5] * 3}))
    monkeypatch.setattr(boost_command, "step", lambda *_given, **_more: 0)
    assert cli.main(line) == 0 and "7.5000" in capsys.readouterr().out
    checkpoints = tmp_path / "out/run/checkpoints"
    (checkpoints / kept["checkpoint"]).rename(checkpoints / "iter_0000008")
    (checkpoints / TRACKER).write_text("8")
    assert cli.main(line) == 0 and "7.5000" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out/after.json").read_text())["checkpoint"] == "iter_0000008"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--grow", "*E"], "has an MTP block (*E), which is trained: leave --grow out"),
        (["--depths", "0"], "--depths 0: give 1 to 32"),
        (["--cp", "2"], "--context-parallel-size 2"),
        (["--seq-length", "3"], "--seq-length 3: depth 3 has no label: give more"),
        (["--ep", "3"], "is not divisible by EP=3"),
        (["--dp", "3"], "global_batch_size"),
        (["--data-path", "/nowhere/x"], "there is no /nowhere/x.bin and .idx"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere is missing"),
    ],
)
def test_what_is_refused(
    folders: Folders, more: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    """One line, and one for each rule of a layout; exit code 2, and nothing is written."""
    assert cli.main(words(folders, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) <= 1 + error.count("  - ")
    assert not (tmp_path / "out").exists()


def test_a_start_that_fails_leaves_no_folder(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The disk is full while the text is encoded: the next start begins anew."""
    (tmp_path / "text.txt").write_text("".join(f"a line {i * 7 % 23} of some text\n" for i in range(3000)))
    line = words(folders, tmp_path / "out", "--text", tmp_path / "text.txt")

    def full(*_given: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as during:
        during.setattr(boost_inputs, "write_dataset", full)
        assert cli.main(line) != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]
    monkeypatch.setattr(boost_command, "step", untrained([130]))
    assert cli.main(line) == 130
    assert (tmp_path / "out/data/corpus.idx").exists()
    capsys.readouterr()


def test_no_mtp_and_no_growth(folders: Folders, tmp_path: Path, capsys: Capture) -> None:
    bare = without_mtp(folders, tmp_path / "bare")
    assert cli.main(words(folders, tmp_path / "out", source=bare)) == 2
    assert "has no MTP block to train: --grow '*E' adds one" in capsys.readouterr().err
    assert cli.main(words(folders, tmp_path / "out", "--grow", "*-", source=bare)) == 2
    assert "pattern has - layers but dense_ffn_hidden_size is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def without_mtp(folders: Folders, folder: Path) -> Path:
    """A Hugging Face folder of the model without MTP, with its tokenizer."""
    config = small_config(mtp=False)
    write_hf(folder, config, values=agreeing_tensors(config, 0.05, seed=4), dtype="float32")
    for file in folders.tokenizer.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.full
def test_trained(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The heads come nearer to the model, which is the same to the bit afterwards."""
    monkeypatch.setattr(processes, "follow", follow_forked)
    line = words(folders, tmp_path / "out")
    line[line.index("--steps") + 1] = "20"
    assert cli.main(line) == 0
    before, after = (
        json.loads((tmp_path / f"out/{name}.json").read_text())["agreement"] for name in ("before", "after")
    )
    assert all(new["kl"] < old["kl"] for old, new in zip(before, after, strict=True))
    require_same_trunk(folders.megatron, tmp_path / "out/run")


@pytest.mark.full
def test_grown(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A model without MTP gets a block, from a Hugging Face folder and another text."""
    monkeypatch.setattr(processes, "follow", follow_forked)
    bare, text = without_mtp(folders, tmp_path / "bare"), tmp_path / "text.txt"
    text.write_text("".join(f"a line {i * 7 % 23} of some text\n" for i in range(3000)), encoding="utf-8")
    line = words(folders, tmp_path / "out", "--grow", "*E", "--text", text, source=bare)
    line[line.index("--steps") + 1] = "20"
    assert cli.main(line) == 0
    after = json.loads((tmp_path / "out/after.json").read_text())["agreement"]
    assert len(after) == 3 and not (tmp_path / "out/before.json").exists()
    require_same_trunk(bare, tmp_path / "out/run")


def require_same_trunk(before: Path, after: Path) -> None:
    """All tensors but MTP's are equal to the bit, and MTP's are there."""
    old, new = (_tensors(folder) for folder in (before, after))
    trunk = {name for name in old if not name.startswith("mtp.")}
    assert trunk == {name for name in new if not name.startswith("mtp.")} and trunk != set(new)
    for name in trunk:
        assert np.array_equal(old[name], new[name][: len(old[name])]), name


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Bits of all tensors under Hugging Face names."""
    source = find_checkpoint(folder).open(None).hf_view()
    return {
        name: source.read(name, tuple((0, size) for size in entry.shape))
        for name, entry in source.tensors.items()
    }
