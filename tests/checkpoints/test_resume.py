"""Repair of a tracker that does not name the last complete checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints import folders, pickles, resume
from megatron_nemotron3.checkpoints.resume import (
    LoadFolder,
    LoadOptions,
    before_start,
    load_options,
    repair_tracker,
)
from megatron_nemotron3.checkpoints.structure import check_structure
from megatron_nemotron3.common import limits
from tests.support import checkpoint_writer as writer
from tests.support.distributed import run_launcher


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writer.write(tmp_path_factory.mktemp("resume") / "iter_0000002", writer.tensors(), 2)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Complete checkpoints 2 and 4; the tracker names 4."""
    for iteration in (2, 4):
        shutil.copytree(made, tmp_path / f"iter_{iteration:07d}")
    (tmp_path / writer.TRACKER).write_text("4")
    return tmp_path


def _tracker(root: Path) -> str:
    return (root / writer.TRACKER).read_text()


def _older(path: Path, seconds: float) -> None:
    times = path.stat().st_mtime - seconds
    os.utime(path, (times, times))


def test_a_machine_without_processes_gives_no_verdict(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that tries a pickle cannot be started: no checkpoint is called unfinished or deleted."""
    (root / writer.TRACKER).write_text("2")
    newer = root / "iter_0000004"
    (newer / "metadata.json").unlink()  # torch's own format has none
    monkeypatch.setattr(pickles, "_tried", set())
    monkeypatch.setattr(pickles, "_is_harmless", lambda data: False)

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(limits, "_fork", refused)
    for work in (resume.remove_incomplete, check_structure):
        with pytest.raises(limits.ChildError, match="Resource temporarily unavailable"):
            work(newer if work is check_structure else root)
    assert newer.exists()
    (root / writer.TRACKER).write_text("")
    with pytest.raises(limits.ChildError):
        repair_tracker(LoadFolder(root))
    assert _tracker(root) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\0\0\0", r"holds '\x00\x00\x00', which is not an iteration"),
        (b"-4", "holds '-4', which is not an iteration"),
        (b"\xff\xfe", "not an iteration"),
        (b"6", "named iteration 6, which is incomplete"),
        (None, "was missing"),
    ],
)
def test_a_broken_tracker_is_mended(root: Path, text: bytes | None, why: str) -> None:
    tracker = root / writer.TRACKER
    tracker.unlink()
    if text is not None:
        tracker.write_bytes(text)
    (line,) = repair_tracker(LoadFolder(root))
    assert line.startswith(f"{tracker} {why}") or why in line
    assert line.endswith("it now names 4, the last complete checkpoint")
    assert _tracker(root) == "4" and repair_tracker(LoadFolder(root)) == []
    assert sorted(os.listdir(root)) == ["iter_0000002", "iter_0000004", writer.TRACKER]


def test_killed_between_checkpoint_and_tracker(root: Path) -> None:
    (root / writer.TRACKER).write_text("2")
    _older(root / writer.TRACKER, 60)
    (line,) = repair_tracker(LoadFolder(root))
    assert "named iteration 2, but the save of iteration 4 was complete" in line and _tracker(root) == "4"


def test_a_time_to_come_does_not_move_a_tracker(root: Path) -> None:
    """A clock that was set back, or that of a file server: the tracker may have been set back by hand."""
    (root / writer.TRACKER).write_text("2")
    _older(root / "iter_0000004" / "metadata.json", -1e6)
    assert repair_tracker(LoadFolder(root)) == [] and _tracker(root) == "2"


def test_a_tracker_set_back_by_hand_stays(root: Path) -> None:
    _older(root / "iter_0000004" / "metadata.json", 60)
    (root / writer.TRACKER).write_text("2")
    assert repair_tracker(LoadFolder(root)) == [] and _tracker(root) == "2"


@pytest.mark.parametrize("harm", ["metadata.json", "all", "empty"])
def test_unfinished_folders_are_passed_over(root: Path, harm: str) -> None:
    """The tracker names a checkpoint that never reached the disk, or a newer save was interrupted."""
    path = root / "iter_0000004"
    if harm == "all":
        shutil.rmtree(path)
    else:
        (path / "metadata.json").unlink()
        if harm == "empty":  # killed between open and write
            (path / "metadata.json").touch()
    (line,) = repair_tracker(LoadFolder(root))
    assert f"named iteration 4, which is incomplete ({path}" in line and _tracker(root) == "2"
    assert repair_tracker(LoadFolder(root)) == []
    (root / writer.TRACKER).unlink()
    assert "was missing: it now names 2" in repair_tracker(LoadFolder(root))[0]


def test_a_damaged_checkpoint_stops_the_run(root: Path) -> None:
    path = root / "iter_0000004" / "__1_0.distcp"
    path.unlink()
    with pytest.raises(ValueError) as stopped:
        repair_tracker(LoadFolder(root))
    assert str(stopped.value).startswith(f"{path}: No such file")
    assert "give --ckpt-step 2, which is complete" in str(stopped.value)
    assert _tracker(root) == "4"
    assert repair_tracker(LoadFolder(root, step=2)) == []
    shutil.rmtree(root / "iter_0000002")
    with pytest.raises(ValueError, match="no other checkpoint there is complete"):
        repair_tracker(LoadFolder(root))


def test_ckpt_step(root: Path) -> None:
    (root / "iter_0000002" / "__1_0.distcp").unlink()
    assert repair_tracker(LoadFolder(root)) == []
    with pytest.raises(ValueError, match=r"iter_0000002/__1_0.distcp: .*give --ckpt-step 4"):
        repair_tracker(LoadFolder(root, step=2))
    with pytest.raises(ValueError, match=r"iter_0000003: does not exist .*give --ckpt-step 4"):
        repair_tracker(LoadFolder(root, step=3))
    # Megatron reads the tracker even then, and ends if it is empty.
    (root / writer.TRACKER).write_text("")
    assert repair_tracker(LoadFolder(root, step=4)) and _tracker(root) == "4"
    (root / writer.TRACKER).unlink()
    assert repair_tracker(LoadFolder(root, step=4)) == []


def test_release(root: Path) -> None:
    shutil.move(root / "iter_0000004", root / "release")
    (root / writer.TRACKER).write_text("release\n")
    _older(root / "iter_0000002" / "metadata.json", 60)
    assert repair_tracker(LoadFolder(root)) == [] and repair_tracker(LoadFolder(root, step=2)) == []
    (root / "release" / "__0_0.distcp").unlink()
    with pytest.raises(
        ValueError, match="the release checkpoint, which is to be loaded, is damaged: write 2 into"
    ):
        repair_tracker(LoadFolder(root))


@pytest.mark.parametrize("tracker", [None, "6"])
def test_a_complete_release_without_a_tracker(root: Path, tracker: str | None) -> None:
    """Megatron would start from random weights, silently; an iteration goes before the release."""
    shutil.copytree(root / "iter_0000004", root / "release")
    (root / writer.TRACKER).unlink()
    assert "it now names 4" in repair_tracker(LoadFolder(root))[0]
    shutil.rmtree(root / "iter_0000002")
    (root / "iter_0000004" / "metadata.json").unlink()  # the first save of a run was interrupted
    (root / writer.TRACKER).unlink()
    if tracker is not None:
        (root / writer.TRACKER).write_text(tracker)
    (line,) = repair_tracker(LoadFolder(root))
    assert line.endswith("it now names release, the last complete checkpoint")
    assert _tracker(root) == "release" and repair_tracker(LoadFolder(root)) == []
    assert resume.wait_for_repair(LoadFolder(root), 0.1) == []
    shutil.rmtree(root / "iter_0000004")
    (root / writer.TRACKER).unlink()
    with pytest.raises(ValueError, match=r"iter_0000004: does not exist .*--ckpt-step 4 cannot be loaded"):
        repair_tracker(LoadFolder(root, step=4))
    assert not (root / writer.TRACKER).exists()
    assert resume.tracker_fix(LoadFolder(root)) == resume.TrackerFix("release", "was missing")


def test_a_release_does_not_replace_what_a_save_finished(root: Path) -> None:
    """Neither a damaged checkpoint nor one of another format; and it must be complete itself."""
    shutil.copytree(root / "iter_0000004", root / "release")
    (root / writer.TRACKER).write_text("")
    for iteration in (2, 4):
        (root / f"iter_{iteration:07d}" / ".metadata").unlink()
    with pytest.raises(ValueError, match="it is empty .* and no checkpoint in .* is complete"):
        repair_tracker(LoadFolder(root))
    for iteration in (2, 4):
        shutil.rmtree(root / f"iter_{iteration:07d}")
    (root / "release" / "metadata.json").unlink()
    with pytest.raises(ValueError, match="it is empty .* and no checkpoint in .* is complete"):
        repair_tracker(LoadFolder(root))
    (root / writer.TRACKER).unlink()
    assert repair_tracker(LoadFolder(root)) == []


def test_a_damaged_release_without_a_tracker_is_not_random_weights(root: Path) -> None:
    (root / "iter_0000004").rename(root / "release")
    shutil.rmtree(root / "iter_0000002")
    (root / writer.TRACKER).unlink()
    (root / "release" / ".metadata").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="has no other checkpoint"):
        repair_tracker(LoadFolder(root))


def test_legacy_and_foreign_folders_are_upstreams_business(root: Path) -> None:
    (root / "iter_0000006" / "mp_rank_00").mkdir(parents=True)
    (root / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt").touch()
    (root / writer.TRACKER).write_text("6")
    assert repair_tracker(LoadFolder(root)) == []
    (root / writer.TRACKER).write_text("")
    assert repair_tracker(LoadFolder(root)) and _tracker(root) == "4"
    for iteration in (2, 4):
        shutil.rmtree(root / f"iter_{iteration:07d}")
    (root / writer.TRACKER).write_text("")
    with pytest.raises(ValueError, match="if you know it is, write 6 into the file"):
        repair_tracker(LoadFolder(root))
    (root / writer.TRACKER).unlink()
    assert repair_tracker(LoadFolder(root)) == []
    (root / "iter_0000008").mkdir()
    (root / "iter_0000008" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (root / writer.TRACKER).write_text("8")
    assert repair_tracker(LoadFolder(root)) == []


def test_torch_dcp_has_no_metadata_json(root: Path) -> None:
    """The index is written last. An unfinished torch_dist folder differs by having the common state."""
    import pickle

    path = root / "iter_0000004"
    (path / "metadata.json").unlink()
    index = pickle.loads((path / ".metadata").read_bytes())
    del index.state_dict_metadata["common_state/shard_0_1"]
    index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != "common_state/shard_0_1"}
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert repair_tracker(LoadFolder(root)) == []


def test_nothing_complete(root: Path) -> None:
    for iteration in (2, 4):
        (root / f"iter_{iteration:07d}" / "metadata.json").unlink()
    (root / writer.TRACKER).write_text("")
    with pytest.raises(ValueError, match=f"is empty .*no checkpoint in {root} is complete.*another --load"):
        repair_tracker(LoadFolder(root))
    (root / writer.TRACKER).unlink()
    assert repair_tracker(LoadFolder(root)) == []  # the first save never ended: Megatron starts anew
    writer.finish(root / "iter_0000002")
    (root / "iter_0000002" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="__0_0.distcp: No such file"):
        repair_tracker(LoadFolder(root))
    assert repair_tracker(LoadFolder(root / "nowhere")) == []


def test_a_tracker_that_cannot_be_written(root: Path) -> None:
    (root / writer.TRACKER).unlink()
    (root / writer.TRACKER).mkdir()
    with pytest.raises(ValueError, match="cannot be read.*iteration 4, but the file cannot be written"):
        repair_tracker(LoadFolder(root))


def test_a_save_with_a_manifest_ends_with_it(root: Path) -> None:
    (root / writer.TRACKER).write_text("2")
    _older(root / writer.TRACKER, 60)
    assert repair_tracker(LoadFolder(root, manifest=True)) == []
    (root / "iter_0000004" / "integrity.json").write_text("{}")
    assert repair_tracker(LoadFolder(root, manifest=True)) and _tracker(root) == "4"


def test_non_persistent_checkpoints(root: Path, made: Path) -> None:
    place = root / "non_persistent"
    shutil.copytree(made, place / "iter_0000005")
    (place / writer.TRACKER).touch()
    words = ["--load", str(root), "--non-persistent-ckpt-type", "global"]
    (line,) = before_start(words, 0)
    assert str(place) in line and _tracker(place) == "5"
    # Newer than the damaged one, so it is what Megatron loads.
    (root / "iter_0000004" / "__0_0.distcp").unlink()
    assert before_start(words, 0) == []
    with pytest.raises(ValueError, match="is damaged"):
        before_start(words[:2], 0)
    (place / "iter_0000005" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="leave --non-persistent-ckpt-type out"):
        before_start(words, 0)


def test_pretrained(root: Path, tmp_path: Path) -> None:
    """--pretrained-checkpoint is checked only if --load has no checkpoint, as in Megatron."""
    words = ["--load", str(tmp_path / "own"), "--pretrained-checkpoint", str(root)]
    assert before_start(words, 0) == []
    (root / writer.TRACKER).write_text("")
    assert "it now names 4" in before_start(words, 0)[0]
    (root / "iter_0000004" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="is damaged: give --ckpt-step 2"):
        before_start(words, 0)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / writer.TRACKER).write_text("1")
    shutil.copytree(root / "iter_0000002", tmp_path / "own" / "iter_0000001")
    assert before_start(words, 0) == []
    for option in ("--load", "--pretrained-checkpoint"):
        (root / "iter_0000002" / "__0_0.distcp").unlink(missing_ok=True)
        (root / writer.TRACKER).write_text("")
        with pytest.raises(ValueError, match=f"give another {option}"):
            before_start([option, str(root)], 0)
    with pytest.raises(ValueError, match="give --pretrained-checkpoint a folder with this file"):
        before_start(["--pretrained-checkpoint", str(tmp_path / "own" / "iter_0000001")], 0)


def test_other_ranks_wait_for_rank_0(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--load", str(root)]
    assert before_start(words, 1) == []
    (root / writer.TRACKER).write_text("")
    seen: list[str] = []
    waiting = threading.Thread(target=lambda: (before_start(words, 1), seen.append(_tracker(root))))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and _tracker(root) == ""
    before_start(words, 0)
    waiting.join(10)
    assert seen == ["4"]
    (root / writer.TRACKER).unlink()
    with pytest.raises(ValueError, match="rank 0 should have written 4 into it, but did not within 0 s"):
        resume.wait_for_repair(LoadFolder(root), patience=0.2)
    shutil.rmtree(root / "iter_0000002")
    (root / "iter_0000004" / "metadata.json").unlink()
    assert before_start(words, 1) == []  # nothing to fix: rank 0 goes on, too


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", LoadOptions()),
        ("--load a --load=b", LoadOptions(Path("b"))),
        ("--load msc://bucket/a --pretrained-checkpoint p", LoadOptions()),
        ("--load a --pretrained-checkpoint p", LoadOptions(Path("a"), pretrained=Path("p"))),
        ("--load a --ckpt-step 7 --verify-integrity", LoadOptions(Path("a"), 7, None, True)),
        ("--load a --ckpt-step 0", LoadOptions(Path("a"))),
        (
            "--load a --non-persistent-ckpt-type global",
            LoadOptions(Path("a"), None, Path("a/non_persistent")),
        ),
        ("--load a --non-persistent-ckpt-type local", LoadOptions(Path("a"))),
        (
            "--non-persistent-ckpt-type=global --non-persistent-global-ckpt-dir n",
            LoadOptions(None, None, Path("n")),
        ),
    ],
)
def test_the_command_line(words: str, expected: LoadOptions) -> None:
    assert load_options(words.split()) == expected


def test_the_launcher_settles_before_any_script(root: Path, tmp_path: Path) -> None:
    """The launcher also repairs the tracker for a stock Megatron script."""
    script = tmp_path / "script.py"
    script.write_text(f"import os; print('read', repr(open({str(root / writer.TRACKER)!r}).read()))")
    (root / writer.TRACKER).write_text("")
    out = run_launcher(["--device", "cpu", str(script), "--load", str(root)], 2)
    assert out.count("is empty (0 bytes): it now names 4") == 1 and out.count("read '4'") == 2
    (root / "iter_0000004" / "__1_0.distcp").unlink()
    with pytest.raises(RuntimeError, match=r"SystemExit: 2"):
        run_launcher(["--device", "cpu", str(script), "--load", str(root)], 1)


def test_only_unfinished_folders_are_removed(root: Path) -> None:
    (root / "iter_other").mkdir()
    unfinished = root / "iter_0000006"
    unfinished.mkdir()
    shutil.copytree(root / "iter_0000004", root / "iter_0000008")
    (root / "iter_0000008" / "__0_0.distcp").unlink()
    (root / writer.TRACKER).write_text("")  # killed while it was written: nothing complete may go
    assert resume.remove_incomplete(root) == [unfinished]
    (root / writer.TRACKER).write_text("2")
    (root / "iter_0000004" / "metadata.json").unlink()
    assert resume.remove_incomplete(root) == [root / "iter_0000004"]
    assert sorted(os.listdir(root)) == ["iter_0000002", "iter_0000008", "iter_other", writer.TRACKER]


def test_room_is_checked_before_any_work(tmp_path: Path) -> None:
    folders.check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(ValueError, match="a checkpoint needs .* MB, but .* MB are free"):
        folders.check_room(tmp_path / "not" / "there", 1 << 60)
    assert not (tmp_path / "not").exists()
