"""`convert to-hf --watch` follows a job that saves, removes what it saved, and dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import conversion, follow
from megatron_nemotron3.checkpoints.folders import write_tracker
from megatron_nemotron3.models import get, tiny
from tests.support.counted_job import digest
from tests.support.hf_folders import write_hf

Capture = pytest.CaptureFixture[str]
CONFIG = tiny(get("super")).but(pattern="M*E")
ONE = ("--workers", "1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One complete checkpoint, and what its export is."""
    home = tmp_path_factory.mktemp("saved")
    write_hf(home / "hf", CONFIG)
    assert cli.main(["convert", "from-hf", str(home / "hf"), str(home / "megatron"), *ONE]) == 0
    return home


def save(saved: Path, folder: Path, iteration: int) -> Path:
    """A save as Megatron does it: the tracker comes last."""
    place = folder / f"iter_{iteration:07d}"
    shutil.copytree(saved / "megatron/release", place)
    write_tracker(folder, iteration)
    return place


def watch(*words: object) -> int:
    return cli.main(["convert", "to-hf", *map(str, words), *ONE, "--watch", "0.2", "--once"])


def exported(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_every_complete_checkpoint_once(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """A save in progress is left alone: without its last file, or before the tracker names it."""
    job, out = tmp_path / "run/checkpoints", tmp_path / "hf"
    job.mkdir(parents=True)
    assert watch(tmp_path / "run", out) == 0 and exported(out) == []
    save(saved, job, 2)
    save(saved, job, 4)
    unfinished = save(saved, job, 6)
    (unfinished / "metadata.json").unlink()
    assert watch(tmp_path / "run", out) == 0
    assert exported(out) == ["iter_0000002", "iter_0000004"]
    shutil.copy(saved / "megatron/release/metadata.json", unfinished)
    write_tracker(job, 4)
    before = digest(out)
    assert watch(job, out) == 0 and digest(out) == before
    write_tracker(job, 6)
    assert watch(job, out) == 0
    assert exported(out) == ["iter_0000002", "iter_0000004", "iter_0000006"]
    for name in exported(out):
        assert cli.main(["verify", str(out / name), str(saved / "hf"), *ONE]) == 0
    capsys.readouterr()


def test_keep_last(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """What was removed is not exported again, and old iterations are not exported at all."""
    job, out = tmp_path / "job", tmp_path / "hf"
    for iteration in (1, 2, 3):
        save(saved, job, iteration)
    for _ in range(2):
        assert watch(job, out, "--keep-last", 2) == 0
        assert exported(out) == ["iter_0000002", "iter_0000003"]
    save(saved, job, 4)
    assert watch(job, out, "--keep-last", 2) == 0
    assert exported(out) == ["iter_0000003", "iter_0000004"]
    assert "removed      " in capsys.readouterr().out
    save(saved, job, 5)
    assert watch(job, out, "--keep-last", 2, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(one["iteration"], one["written"]) for one in facts["exports"]] == [(5, True)]
    assert facts["removed"] == [str(out / "iter_0000003")] and facts["left_out"] == []


def test_removed_while_it_is_read(
    saved: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron keeps its latest checkpoints only; the next is exported nevertheless."""
    job, out = tmp_path / "job", tmp_path / "hf"
    first = save(saved, job, 1)
    save(saved, job, 2)
    run = conversion.run

    def removed(made: object, **options: object) -> object:
        shutil.rmtree(first, ignore_errors=True)
        return run(made, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(conversion, "run", removed)
    assert watch(job, out) == 1
    assert "left out     iteration 1: it was removed while it was read" in capsys.readouterr().out
    assert exported(out) == ["iter_0000002"]
    assert watch(job, out) == 0


def test_damage_ends_in_a_line(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    job, out = tmp_path / "job", tmp_path / "hf"
    place = save(saved, job, 1)
    [file] = place.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    save(saved, job, 2)
    assert watch(job, out) == 1
    assert "left out     iteration 1: " in capsys.readouterr().out
    assert [name for name in exported(out) if "partial" not in name] == ["iter_0000002"]


def start(job: Path, out: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "megatron_nemotron3", "convert", "to-hf", str(job), str(out)]
    return subprocess.Popen(
        [*words, "--watch", "0.1", "--workers", "2", "--shard-size", "300kB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def test_killed_and_started_again(saved: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of an export; a second watcher is refused; signals end it cleanly."""
    job, out = tmp_path / "job", tmp_path / "hf"
    save(saved, job, 1)
    first = start(job, out)
    wait_for(out / "iter_0000001.partial")
    first.kill()
    first.communicate()
    for number in (signal.SIGTERM, signal.SIGINT):
        again = start(job, out)
        assert again.stdout is not None and again.stdout.readline().startswith("watching")
        wait_for(out / "iter_0000001")
        assert follow.follow(job, tmp_path / "o", conversion.ToHfOptions(), follow.Following(once=True)) == 0
        with pytest.raises(ValueError, match="is in use by"):
            follow.follow(job, out, conversion.ToHfOptions(), follow.Following(once=True))
        os.killpg(again.pid, number)
        text, _ = again.communicate(timeout=60)
        assert again.returncode == 0 and "Traceback" not in text, text
        assert text.endswith("stopped      the same command continues\n")
    assert exported(out) == ["iter_0000001"]
    assert cli.main(["verify", str(out / "iter_0000001"), str(saved / "hf"), *ONE]) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["{hf}", "{out}", "--watch"], "--watch needs the folder of a run, or that of --save"),
        (["{none}", "{out}", "--watch"], "it does not exist"),
        (["{job}", "{job}", "--watch"], "it exists and is not an export"),
        (["{job}", "{out}", "--watch", "0"], "give seconds above 0"),
        (["{job}", "{out}", "--watch", "--keep-last", "0"], "give 1 or more"),
        (["{job}", "{out}", "--watch", "--iteration", "1"], "leave out --dry-run and --iteration"),
        (["{job}", "{out}", "--once"], "belong to --watch"),
        (["memory://a/b", "{out}", "--watch"], "not for a URL"),
    ],
)
def test_bad_input(saved: Path, tmp_path: Path, capsys: Capture, words: list[str], message: str) -> None:
    save(saved, tmp_path / "job", 1)
    places = {name: tmp_path / name for name in ("job", "out", "none")} | {"hf": saved / "hf"}
    assert cli.main(["convert", "to-hf", *(word.format(**places) for word in words)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
