"""More steps in the same folder, and a second process there, with real checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nemotron3 import cli, run
from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.state import loaded_state
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.ranks import RANK_VARIABLES
from megatron_nemotron3.launch import ParallelLayout, TrainingData, continued, flags, manifest, to_argv
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.script_folders import update_manifest
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.train import processes
from megatron_nemotron3.train.training import schedule_of
from tests.support.programs import follow_forked

_RATE = re.compile(r"iteration +(\d+)/.*learning rate: (\S+)")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(1500)))
    return path


def _train(output: Path, text: Path, *words: str, extra: tuple[str, ...] = ()) -> int:
    given = ["train", "nano", "--tiny", "--device", "cpu", "--output", str(output), "--text", str(text)]
    short = ["--seq-length", "32", "--micro-batch-size", "2", *words]
    return cli.main([*given, *short, "--", "--eval-iters", "4", "--save-interval", "100", *extra])


def _rates(output: Path) -> dict[int, float]:
    """The learning rate that Megatron logs after each step; the last line of a step counts."""
    return {int(step): float(rate) for step, rate in _RATE.findall((output / "train.log").read_text())}


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of six steps."""
    output = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "follow", follow_forked)
        assert _train(output, text, "--steps", "6") == 0
    return output


def test_another_layout_is_refused_before_anything_starts(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, output := tmp_path / "run")
    before = {path: path.read_bytes() for path in output.iterdir() if path.is_file()}
    assert _train(output, text, "--steps", "8", "--tp", "2") == 2
    assert "step 6 was saved at TP=1, with an optimizer state that" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in output.iterdir() if path.is_file()}


def test_six_steps_then_eight_then_fewer(
    trained: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = shutil.copytree(trained, tmp_path / "run")  # the other tests keep the six steps
    monkeypatch.setattr(processes, "follow", follow_forked)
    found = loaded_state(["--load", str(trained / "checkpoints")])
    assert found is not None
    saved = continued.saved_schedule(found[0], found[1].scheduler, found[1].args)
    launch = Launch(
        config=tiny(get("nano")),
        schedule=schedule_of(tiny(get("nano")), Launch.of("nano").layout, steps=8, micro_batch_size=2),
    )
    wanted = continued.schedule_of_arguments(to_argv(flags(launch)))
    assert saved is not None and wanted is not None and saved.step == 6
    words, (line,) = continued.continued(saved, wanted)
    plan = continued.schedule_of_arguments([*to_argv(flags(launch)), *words])
    assert plan is not None

    # Six steps had six evaluations, and eight steps have an interval of two: fewer than that in all.
    assert _train(trained, text, "--steps", "8") == 0
    out = capsys.readouterr().out
    assert out.count(line) == 1 and "resuming from step 6" in out
    assert folders.latest_iteration(trained / "checkpoints") == 8
    rates = _rates(trained)
    assert sorted(rates) == [1, 2, 3, 4, 5, 6, 7, 8]
    for step in (7, 8):
        assert rates[step] == pytest.approx(plan.rate(2 * step), rel=1e-6)

    assert _train(trained, text, "--steps", "4") == 0
    out = capsys.readouterr().out
    assert "already trained to step 8, beyond the 4 steps asked for" in out
    assert _train(trained, text, "--steps", "9", "--lr", "1e-3") == 2
    said = capsys.readouterr().err
    assert "with --lr 0.004" in said and len(said.splitlines()) == 1
    assert not (trained / "checkpoints" / lock.NAME).exists()


def test_a_stock_script_is_told_which_option_megatron_needs(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it Megatron ends in an AssertionError, after it has built the model."""
    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    folder = str(trained / "checkpoints")
    config = tiny(get("nano"))
    launch = Launch(
        config=config,
        schedule=schedule_of(config, Launch.of("nano").layout, steps=100, micro_batch_size=2),
        data=TrainingData(mock_data=True, save=folder, load=folder),
    )
    with pytest.raises(SystemExit) as end:
        run.main(["--device", "cpu", str(processes.ENTRY), *to_argv(flags(launch))])
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "has another schedule, in samples: " in said and "-> 200" in said
    assert "Megatron needs --override-opt-param-scheduler to take the new one" in said
    assert not (Path(folder) / lock.NAME).exists()

    words = to_argv(flags(launch))
    assert continued.refused([*words, continued.OVERRIDE]) is None
    # The checkpoint's lengths with a WSD decay of this command line's would be a third schedule.
    said = continued.refused([*words, continued.KEEP]) or ""
    assert "does not hold the length of the WSD decay" in said
    length = said.split()[-1]
    assert continued.refused([*words, continued.KEEP, "--lr-wsd-decay-iters", length]) is None


def test_the_folder_of_another_run(
    trained: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, or another precision that nobody asked for, is refused before anything is written."""

    def content() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in trained.rglob("*") if path.is_file()}

    before = content()
    found = json.loads((trained / manifest.NAME).read_text())
    assert found["parts"]["model"]["name"] == "nano-tiny" and "huggingface" in str(found["parts"]).lower()
    words = ["--device", "cpu", "--output", str(trained), "--text", str(text), "--seq-length", "32"]
    assert cli.main(["train", "super", "--tiny", *words, "--steps", "90"]) == 2
    said = capsys.readouterr()
    assert f"{trained} holds a training of nano-tiny, not of super-tiny (" in said.err
    assert "saving" not in said.out + said.err and len(said.err.splitlines()) == 1
    assert _train(trained, text, "--steps", "90", "--precision", "bf16") == 2
    assert "with fp32, not bf16 (bf16 not given -> on): give --change precision" in capsys.readouterr().err
    other = text.with_name("other.txt")
    other.write_text(text.read_text() * 2)
    assert _train(trained, other, "--steps", "90") == 2
    assert "with another " in (said := capsys.readouterr()).err and "--change " in said.err
    after = {path: time for path, time in content().items() if "/data/" not in path}  # prepared text stays
    assert after == {path: time for path, time in before.items() if "/data/" not in path}


def test_a_folder_of_an_older_version_gets_its_manifest(trained: Path, tmp_path: Path) -> None:
    """Compared with the arguments of the checkpoint; also by `nemotron3 run` with a stock script."""
    save = tmp_path / "stock"
    save.symlink_to(trained / "checkpoints")

    def settle(name: str) -> list[str]:
        launch = Launch(config=tiny(get(name)), precision="fp32", data=TrainingData(save=str(save)))
        return update_manifest(save, to_argv(flags(launch)))

    try:
        with pytest.raises(ValueError, match="another model"):
            settle("super")
        (line,) = settle("nano")
        assert "the folder had none" in line and (save / manifest.NAME).is_file()
        assert settle("nano") == []
    finally:
        (save / manifest.NAME).unlink(missing_ok=True)


def test_a_second_training_is_refused(
    trained: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a stock script, and nothing in the folder changes."""

    def listing() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in trained.rglob("*") if path.name != lock.NAME}

    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr(lock, "_LOOK", 0.05)  # the seconds in which a holder may end
    folder = trained / "checkpoints"
    with lock.held(folder, "the first"):
        before = listing()
        assert _train(trained, text, "--steps", "20") == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"nemotron3 train: {folder} is in use by {os.getpid()} on ")
        assert said.endswith(": the first (wait for it, or choose another folder)")
        with pytest.raises(SystemExit) as end:
            run.main(["--device", "cpu", str(processes.ENTRY), "--save", str(folder)])
        assert end.value.code == 2 and "is in use by" in capsys.readouterr().err
        # A run that only loads there repairs nothing.
        (folder / folders.TRACKER).write_text("")
        with pytest.raises(SystemExit):
            run.main(["--device", "cpu", str(processes.ENTRY), "--load", str(folder)])
        assert "is empty" in (said := capsys.readouterr().err) and "the folder is being written by" in said
        assert (folder / folders.TRACKER).read_text() == ""
    folders.write_tracker(folder, max(folders.iterations(folder)))
    assert set(before) == set(listing())


@pytest.mark.full  # the rates: tests/launch/test_continued.py
def test_held_rates(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "follow", follow_forked)
    assert _train(tmp_path, text, "--steps", "3") == 0
    assert _train(tmp_path, text, "--steps", "5", extra=(continued.KEEP,)) == 0
    assert "the checkpoint's schedule is kept: learning rate 4e-05" in capsys.readouterr().out
    assert {_rates(tmp_path)[step] for step in (4, 5)} == {4e-5}


@pytest.mark.full  # the lock itself: tests/common/test_lock.py
def test_ranks_keep_the_folder_when_the_command_is_killed(text: Path, tmp_path: Path) -> None:
    """A rank goes on for a while, and may be saving."""
    words = [sys.executable, "-m", "megatron_nemotron3", "train", "nano", "--tiny", "--device", "cpu"]
    words += ["--steps", "5000", "--seq-length", "32", "--micro-batch-size", "2", "--text", str(text)]
    words += ["--output", str(tmp_path), "--", "--eval-iters", "0"]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert first.stdout is not None
    holder = None
    for line in first.stdout:
        if "/5000" in line:
            holder = lock.holder(tmp_path / "checkpoints")
            break
    assert holder is not None and holder.pid == first.pid, "training did not start"
    records = (tmp_path / "checkpoints" / lock.NAME).read_text().splitlines()
    assert len(records) == 2  # the command and its rank
    first.kill()
    first.communicate()
    with lock.held(tmp_path / "checkpoints", patience=60):  # the rank notices that nobody reads its log
        pass


def test_data_parallel_ranks_share_the_sequences_of_a_step() -> None:
    def sizes(dp: int, **given: int) -> tuple[int | None, int | None]:
        found = schedule_of(tiny(get("super")), ParallelLayout(dp=dp), **given)
        return found.micro_batch_size, found.global_batch_size

    assert [sizes(dp) for dp in (1, 2, 4, 8)] == [(4, 4), (2, 4), (1, 4), (1, 8)]
    assert sizes(2, micro_batch_size=4) == (4, 8)
