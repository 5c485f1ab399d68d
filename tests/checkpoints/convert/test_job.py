"""A folder gets its name when it is complete, a killed job continues, and files are written as streams."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import conversion, streams
from megatron_nemotron3.checkpoints.convert import job as job_module
from megatron_nemotron3.checkpoints.convert.job import JOURNAL, JobProgress, partial_of, run
from megatron_nemotron3.checkpoints.convert.plan import Slices, whole
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, OutputFile, Part, as_bytes, write
from megatron_nemotron3.checkpoints.convert.views import InMemory
from megatron_nemotron3.checkpoints.folders import MANIFEST
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.models.command import StoredModelOptions
from tests.support.counted_job import Numbers, counted, digest, forked, slow
from tests.support.hf_folders import write_hf
from tests.support.killed_command import killed_at


@pytest.mark.parametrize("workers", [1, 3])
def test_every_file_and_its_checksum(tmp_path: Path, workers: int) -> None:
    seen: list[JobProgress] = []
    """What is in a file: `test_the_parts_of_a_file`."""
    job = counted(tmp_path / "new" / "out")
    manifest = run(job, workers=workers, report=seen.append)
    found = digest(tmp_path / "new" / "out")
    assert set(found) == {"sub/file0", "sub/file2", "sub/file4", "index", "sub/last", MANIFEST}
    assert json.loads(found.pop(MANIFEST)) == manifest
    assert sum(length for _, length in json.loads(found["index"])) == len(found["sub/file4"])
    for plan in job.files:
        data = found[plan.name]
        assert len(data) == plan.length
        assert manifest["files"][plan.name] == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    assert seen[-1].done == seen[-1].total == sum(plan.length for plan in job.files)
    assert os.listdir(tmp_path / "new") == ["out"]


@pytest.mark.parametrize(
    ("workers", "step"), [(2, 0.15), *(pytest.param(n, 0.03, marks=pytest.mark.full) for n in (1, 2))]
)
def test_killed_at_any_moment(tmp_path: Path, workers: int, step: float) -> None:
    """Kill the job (SIGKILL), each time a little later, and repeat the command until it ends."""
    run(counted(tmp_path / "whole"))
    expected = digest(tmp_path / "whole")
    kills = 0
    for attempt in range(200):
        child = forked(lambda: slow(tmp_path / "out", workers, 0.004))
        time.sleep(0.05 + step * attempt)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
        kills += 1
        if (tmp_path / "out").exists():  # it has its name: it is complete
            break
    assert digest(tmp_path / "out") == expected
    assert kills >= 2 and not partial_of(tmp_path / "out").exists()


#: Converts sys.argv[2:] and gets the signal sys.argv[1] when its second file is written.
SIGNALLED = """
import os, sys
from megatron_nemotron3 import __main__
from megatron_nemotron3.checkpoints.convert import job
signum, before, files = int(sys.argv.pop(1)), job.write, []
def write(*given, **named):
    entry = before(*given, **named)
    files.append(entry)
    if len(files) == 2:
        os.kill(os.getpid(), signum)
    return entry
job.write = write
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(
    "signum",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_ends_the_command_with_one_line(signum: signal.Signals, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", tiny(get("nano")))
    out = tmp_path / "out"
    words = ["convert", "from-hf", str(tmp_path / "hf"), str(out), "--shard-size", "1MB", "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(int(signum)), *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (128 + signum, "interrupted\n")
    assert not out.exists() and len((partial_of(out) / JOURNAL).read_text().splitlines()) == 2
    assert cli.main(words) == 0 and sorted(os.listdir(tmp_path)) == ["hf", "out"]
    assert cli.main(["convert", "verify", str(tmp_path / "hf"), str(out)]) == 0


def test_finished_files_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = counted(tmp_path / "out")
    written: list[str] = []
    write = job_module.write

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
    child = forked(lambda: slow(tmp_path / "out", 2, 0.02))
    while not (partial / JOURNAL).exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    with pytest.raises(ValueError, match=f"{partial} is in use by {child} on .* since"):
        run(counted(tmp_path / "out"))
    assert os.waitpid(child, 0) == (child, 0)
    run(counted(tmp_path / "whole"))
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_a_damaged_source_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Numbers, name: str, slices: Slices) -> torch.Tensor:
        raise CheckpointError(f"{name} is damaged")

    monkeypatch.setattr(Numbers, "read", damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        run(counted(tmp_path / "out"), workers=2)
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "read", lambda self, name, slices: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ValueError, match="a worker was killed .* fewer --workers"):
        run(counted(tmp_path / "out"), workers=2)


# -- the source changes after a kill -------------------------------------------------------------------


def _small_source(folder: Path) -> Path:
    write_hf(folder, tiny(get("super")).but(pattern="M*", mtp_pattern=None, mtp_num_layers=0, vocab_size=40))
    return folder


def _new_weights(folder: Path) -> None:
    """Other weights of the same size."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2000:] = bytes(byte ^ 1 for byte in data[-2000:])
    path.write_bytes(data)


def _new_metadata(folder: Path) -> None:
    """The same model in other words; the weights stay."""
    data = json.loads((folder / "config.json").read_text())
    data["_name_or_path"] = data.get("_name_or_path", "") + "x"
    (folder / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "every"),
    [
        (_new_weights, 7),
        pytest.param(_new_weights, 1, marks=pytest.mark.full),
        pytest.param(_new_metadata, 1, marks=pytest.mark.full),
    ],
)
def test_killed_at_every_step_and_the_source_changed(
    tmp_path: Path, change: Callable[[Path], None], every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command never ends well with old weights. The last steps follow the manifest."""
    source, out = _small_source(tmp_path / "hf"), tmp_path / "out"
    words = ["convert", "from-hf", str(source), str(out), "--workers", "1"]
    steps = killed_at(1000, words)
    assert steps is not None and steps > 20
    refused = 0
    for step in sorted({*range(0, steps, every), *range(steps - 8, steps)}):
        shutil.rmtree(partial_of(out), ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        assert killed_at(step, words) is None
        if out.exists():  # killed after the rename
            continue
        change(source)
        capsys.readouterr()
        status = cli.main(words)
        if status == 2:
            refused += 1
            assert "or the source has changed since" in capsys.readouterr().err and not out.exists()
        else:
            assert (
                status == 0 and cli.main(["convert", "verify", str(source), str(out), "--workers", "1"]) == 0
            )
    assert refused > 4


def test_killed_before_the_folder_has_its_name_then_other_options(tmp_path: Path) -> None:
    """A manifest of a conversion that allowed NaN, or read the optimizer's masters, counts for no other."""
    source, out = _small_source(tmp_path / "hf"), tmp_path / "out"
    with open(source / "model.safetensors", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\xc0\x7f")  # NaN
    words = ["convert", "from-hf", str(source), str(out), "--workers", "1"]
    step = 0
    while not (partial_of(out) / MANIFEST).exists():
        shutil.rmtree(partial_of(out), ignore_errors=True)
        assert killed_at(step := step + 3, [*words, "--allow-nonfinite"]) is None
    assert cli.main(words) == 2 and not out.exists()
    names = {one.name for one in fields(conversion.ToHfOptions)} - set(conversion._NO_EFFECT)
    assert "from_optimizer_master" in names and names < set(conversion._job_options(conversion.ToHfOptions()))
    jobs = [replace(counted(tmp_path), options={"from_masters": given}) for given in (False, True)]
    assert jobs[0].fingerprint() != jobs[1].fingerprint()


def test_options_of_the_command_line_count_in_python(tmp_path: Path) -> None:
    """--shard-size and --model, which a program gives as text and as `StoredModelOptions`."""
    source, ours = _small_source(tmp_path / "hf"), StoredModelOptions(model="ultra")
    with pytest.raises(ValueError, match="ultra"):
        conversion.convert_from_hf(source, tmp_path / "a", conversion.FromHfOptions(which=ours, workers=1))
    assert not (tmp_path / "a").exists()
    options = [conversion.FromHfOptions(shard_size=text, workers=1) for text in ("40000", "40KB", "5GB")]
    plans = [conversion._job_options(one) for one in options]
    assert plans[0] == plans[1] != plans[2]
    for name, one in zip("bc", options[1:], strict=True):
        assert conversion.convert_from_hf(source, tmp_path / name, one) == 0
    files = [len(list((tmp_path / name).glob("release/*.distcp"))) for name in "bc"]
    assert files[0] > files[1] == 1


def test_a_source_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = _small_source(tmp_path / "hf"), tmp_path / "out"
    real = job_module.write

    def change_then_write(*args: Any, **options: Any) -> int:
        _new_weights(source)
        return real(*args, **options)

    monkeypatch.setattr(job_module, "write", change_then_write)
    with pytest.raises(ValueError, match="its files changed while they were converted"):
        conversion.convert_from_hf(source, out, conversion.FromHfOptions(workers=1))
    assert not out.exists()


# -- what is in the way ----------------------------------------------------------------------------------


def test_a_full_disk_says_that_the_command_continues(tmp_path: Path) -> None:
    """RLIMIT_FSIZE ends a write as a full disk does, with another number."""
    run(counted(tmp_path / "whole", rows=4000))

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        try:
            run(counted(tmp_path / "out", rows=4000), workers=2)
        except OSError as problem:
            (tmp_path / "error").write_text(str(problem))

    child = forked(on_a_full_disk)
    assert os.waitpid(child, 0) == (child, 0)
    (line,) = (tmp_path / "error").read_text().splitlines()
    assert "repeat the command, which continues" in line and str(partial_of(tmp_path / "out")) in line
    run(counted(tmp_path / "out", rows=4000))
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_links_in_the_folder(tmp_path: Path) -> None:
    """Nothing is written through a link, and nothing behind it counts as finished."""
    job, elsewhere = counted(tmp_path / "out"), tmp_path / "elsewhere"
    partial = partial_of(job.target)
    run(counted(elsewhere))
    partial.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="it is a link: remove it"):
        run(job)
    partial.unlink()
    partial.mkdir()
    (partial / "sub").symlink_to(elsewhere / "sub")
    entry = json.loads((elsewhere / MANIFEST).read_text())["files"]["sub/file0"]
    lines = [{"plan": job.fingerprint()}, {"file": "sub/file0", **entry}]
    (partial / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = digest(elsewhere)
    run(job)
    assert not (job.target / "sub").is_symlink() and digest(elsewhere) == before
    assert digest(job.target) == before


class Short(io.BytesIO):
    """A file that takes a few bytes at a time, as the system may."""

    def write(self, data: object, /) -> int:
        return super().write(memoryview(data)[:5])  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40), max_size=9), st.integers(1, 50))
def test_length_and_checksum_of_what_is_written(data: list[bytes], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_WRITE", size)
        file, counted, reached = Short(), [], 0
        with OutputFile(file, counted.append) as out:
            for one in data:
                assert out.write(memoryview(one)) == len(one)
                reached += len(one)
                assert out.length == reached
            found = out.crc32
    assert file.getvalue() == b"".join(data)
    assert found == zlib.crc32(b"".join(data)) and sum(counted) == reached


def plan(archives: bool = False) -> FilePlan:
    parts = [Part(b"head")]
    for i in range(6):
        parts += [Part(b"<" * i), Part(tensor=f"t{i}", slices=whole((40, 8)), dtype="uint8")]
    parts += [Part(tensor="t1", slices=((3, 9), (0, 8)), dtype="uint8"), Part(b"end")]
    return FilePlan("file", parts, archives)


@pytest.mark.parametrize("archives", [False, True])
@pytest.mark.parametrize("size", [24, 1 << 20])
def test_the_parts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, archives: bool
) -> None:
    monkeypatch.setattr(streams, "BAND", size)
    monkeypatch.setattr(streams, "_WRITE", 17)
    source, counted = Numbers(tmp_path), []
    entry = write(plan(archives), source, tmp_path / "file", counted.append)
    data = (tmp_path / "file").read_bytes()
    places = entry.pop("places") if archives else []
    assert entry == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    assert sum(counted) == len(data) == plan(archives).length
    expected = [
        source.read(p.tensor, p.slices).numpy().tobytes() if p.tensor else p.data for p in plan().parts
    ]
    if not archives:
        assert data == b"".join(expected)
        return
    for (begin, length), part, plain in zip(places, plan().parts, expected, strict=True):
        stored = data[begin : begin + length]
        if part.tensor:
            stored = torch.load(io.BytesIO(stored), weights_only=True).numpy().tobytes()
        assert stored == plain


@pytest.mark.parametrize("tensor", [torch.arange(12).view(3, 4).t(), torch.arange(24)[::2], torch.ones(())])
def test_bytes_are_in_row_major_order(tensor: torch.Tensor) -> None:
    assert as_bytes(tensor) == tensor.numpy().tobytes()


def test_few_bands_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A band is read when the one before it is written, even if the disk is slow."""
    monkeypatch.setattr(streams, "BAND", 8)
    monkeypatch.setattr(streams, "_WRITE", 8)
    made, written = 0, 0
    source = Numbers(tmp_path)
    read = source.read

    def counting(name: str, slices: Slices) -> torch.Tensor:
        nonlocal made
        made += 1
        assert made <= written + 1
        return read(name, slices)

    def look(length: int) -> None:
        nonlocal written
        written += 1

    monkeypatch.setattr(source, "read", counting)
    write(plan(), source, tmp_path / "file", look)
    assert made == 6 * 40 + 6


def test_what_goes_wrong_ends_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Numbers(tmp_path)
    read = source.read

    def damaged(name: str, slices: Slices) -> torch.Tensor:
        if name == "t3":
            raise CheckpointError("t3 is damaged")
        return read(name, slices)

    def full(length: int) -> None:
        raise OSError("disk full")

    before = threading.active_count()
    with pytest.raises(OSError, match="disk full"):
        write(plan(), source, tmp_path / "file", full)
    monkeypatch.setattr(source, "read", damaged)
    with pytest.raises(CheckpointError, match="t3 is damaged"):
        write(plan(True), source, tmp_path / "file", lambda length: None)
    assert not list(tmp_path.iterdir()) and threading.active_count() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [-float("inf"), float("nan"), 0.0])
def test_values_that_are_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """One among the largest numbers of the type, whose sum is not finite either."""
    tensor = torch.full((60_000, 3), torch.finfo(dtype).max, dtype=dtype)
    tensor[-1, 1] = value
    source = InMemory(tmp_path, {"w": tensor})
    part = Part(tensor="w", slices=whole((60_000, 3)), dtype=str(dtype).removeprefix("torch."))
    one = FilePlan("file", [part])
    if value:
        with pytest.raises(CheckpointError, match="w has values that are NaN or infinite: --allow-nonfin"):
            write(one, source, tmp_path / "file", lambda length: None)
    write(one, source, tmp_path / "file", lambda length: None, finite=not value)
    assert (tmp_path / "file").read_bytes() == as_bytes(tensor)
