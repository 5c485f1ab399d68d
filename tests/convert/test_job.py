"""A folder gets its name when it is complete, and a killed job continues where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy
import pytest

from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.convert import job as job_module
from megatron_nemotron3.convert import streams
from megatron_nemotron3.convert.job import JOURNAL, MANIFEST, Progress, partial_of, run
from megatron_nemotron3.convert.plan import Slices
from megatron_nemotron3.convert.streams import FilePlan
from tests.support.counted_job import Numbers, counted, digest

#: Runs a job in a process of its own: tests kill it.
_COMMAND = "from tests.support.counted_job import main; main({target!r}, {workers}, {delay})"


@pytest.mark.parametrize("workers", [1, 3])
def test_every_file_and_its_checksum(tmp_path: Path, workers: int) -> None:
    seen: list[Progress] = []
    job = counted(tmp_path / "new" / "out")
    manifest = run(job, workers=workers, report=seen.append)
    found = digest(tmp_path / "new" / "out")
    assert set(found) == {"sub/file0", "sub/file2", "sub/file4", "index", "sub/last", MANIFEST}
    assert json.loads(found.pop(MANIFEST)) == manifest
    for plan in job.files:
        expected = b"head%d" % int(plan.name[-1])
        for part in plan.parts[1:]:
            data = job.source.read(part.tensor, part.slices).tobytes()
            expected += b"<" + data + zlib.crc32(data).to_bytes(4, "big")
        assert found[plan.name] == expected
        entry = manifest["files"][plan.name]
        assert entry == {"bytes": len(expected), "crc32": f"{zlib.crc32(expected):08x}"}
    assert seen[-1].done == seen[-1].total == sum(plan.length for plan in job.files)
    assert os.listdir(tmp_path / "new") == ["out"]


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment(tmp_path: Path, workers: int) -> None:
    """Kill the job (SIGKILL), each time a little later, and repeat the command until it ends."""
    run(counted(tmp_path / "whole"))
    expected = digest(tmp_path / "whole")
    command = _COMMAND.format(target=str(tmp_path / "out"), workers=workers, delay=0.004)
    kills = 0
    for attempt in range(200):
        process = subprocess.Popen([sys.executable, "-c", command], cwd=Path(__file__).parents[2])
        try:
            assert process.wait(0.25 + 0.03 * attempt) == 0
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            if (tmp_path / "out").exists():  # it has its name: it is complete
                break
    assert digest(tmp_path / "out") == expected
    assert kills >= 2 and not partial_of(tmp_path / "out").exists()


def test_finished_files_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = counted(tmp_path / "out")
    written: list[str] = []
    write = streams.write

    def fail_at_the_last(plan: FilePlan, *args: object, **options: object) -> int:
        if plan.name == "sub/file4" and not written.count("sub/file4"):
            written.append(plan.name)
            raise OSError("disk gone")
        written.append(plan.name)
        return write(plan, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(job_module, "write", fail_at_the_last)
    with pytest.raises(OSError, match="disk gone"):
        run(job)
    partial = partial_of(tmp_path / "out")
    before = (partial / "sub/file0").stat().st_ino
    with open(partial / JOURNAL, "ab") as journal:
        journal.write(b'{"file": "sub/fi')  # killed while it wrote a line
    (partial / "sub/.file4.part").write_bytes(b"half")
    (partial / "sub/file2").write_bytes(b"cut")
    run(job)
    assert written == ["sub/file0", "sub/file2", "sub/file4", "sub/file2", "sub/file4"]
    assert (tmp_path / "out/sub/file0").stat().st_ino == before
    run(counted(tmp_path / "again"))
    assert digest(tmp_path / "out") == digest(tmp_path / "again")


def test_killed_before_the_journal_has_its_name(tmp_path: Path) -> None:
    partial = partial_of(tmp_path / "out")
    partial.mkdir()
    (partial / f".{JOURNAL}.part").write_bytes(b"{")
    run(counted(tmp_path / "out"))
    run(counted(tmp_path / "whole"))
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_killed_before_the_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job_module.os, "replace", lambda a, b: killed() if b == target else os.rename(a, b))
        run(counted(target))
    assert not (partial_of(target) / JOURNAL).exists()
    written: list[str] = []
    monkeypatch.setattr(job_module, "write", lambda plan, *args, **kwargs: written.append(plan.name))
    run(counted(target))
    assert written == []
    run_again = digest(target)
    monkeypatch.undo()
    run(counted(tmp_path / "whole"))
    assert run_again == digest(tmp_path / "whole")


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(ValueError, match="it exists: give a new folder"):
        run(counted(target))
    (target / "file").unlink()  # an empty folder is as good as none
    partial = partial_of(target)
    partial.mkdir()
    (partial / "mine").touch()
    with pytest.raises(ValueError, match="is not an interrupted conversion: remove it"):
        run(counted(target))
    (partial / "mine").unlink()
    (partial / JOURNAL).write_text('{"plan": "another"}\n')
    with pytest.raises(ValueError, match="an interrupted conversion with other options"):
        run(counted(target))
    (partial / JOURNAL).unlink()
    monkeypatch.setattr(job_module, "free_bytes", lambda target: (64 << 20) + 100)
    with pytest.raises(ValueError, match=r"[\d,]+ bytes are still to be written, 67,108,964 are free"):
        run(counted(target))
    assert not list(partial.iterdir()) and not list(target.iterdir())
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a writable folder"):
        run(counted(tmp_path / "file" / "out"))
    run(counted(target))


def test_two_at_once(tmp_path: Path) -> None:
    """The second says who writes there; it changes nothing, and the first one ends as if alone."""
    partial = partial_of(tmp_path / "out")
    command = _COMMAND.format(target=str(tmp_path / "out"), workers=2, delay=0.02)
    process = subprocess.Popen([sys.executable, "-c", command], cwd=Path(__file__).parents[2])
    while not (partial / JOURNAL).exists():
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(ValueError, match=f"{partial} is in use by {process.pid} on .* since"):
        run(counted(tmp_path / "out"))
    assert process.wait() == 0
    run(counted(tmp_path / "whole"))
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_source_ends_the_job(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Numbers, name: str, slices: Slices) -> numpy.ndarray:
        raise CheckpointError(f"{name} is damaged")

    monkeypatch.setattr(Numbers, "read", damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        run(counted(tmp_path / "out"), workers=workers)
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "read", lambda self, name, slices: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ValueError, match="a worker was killed .* fewer --workers"):
        run(counted(tmp_path / "out"), workers=2)
