"""Checkpoints behind URLs and Hugging Face ids: fsspec's memory and local file systems, and a fake cache."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import remote
from megatron_nemotron3.checkpoints.read import REMOTE
from megatron_nemotron3.models import get, tiny
from tests.support.counted_job import digest
from tests.support.hf_folders import write_hf

fsspec = pytest.importorskip("fsspec")
Capture = pytest.CaptureFixture[str]
CONFIG = tiny(get("super")).but(pattern="M*E")
ONE = ("--workers", "1")


def command(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`hf` and `run`, both also in the memory file system."""
    home = tmp_path_factory.mktemp("remote")
    write_hf(home / "hf", CONFIG, files=2)
    assert command("convert", "from-hf", home / "hf", home / "run/checkpoints", *ONE) == 0
    shutil.copytree(home / "run/checkpoints/release", home / "run/checkpoints/iter_0000005")
    memory = fsspec.filesystem("memory")
    memory.put(str(home / "hf"), "/bucket/hf", recursive=True)
    memory.put(str(home / "run"), "/bucket/run", recursive=True)
    yield home
    memory.rm("/bucket", recursive=True)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not REMOTE and not remote._shown


def urls(folders: Path, kind: str) -> str:
    return {"memory": "memory://bucket", "local": f"local://{folders}", "file": f"file://{folders}"}[kind]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("memory", 2),
        *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in ("memory", "local", "file")),
    ],
)
def test_what_is_read_is_the_same(
    folders: Path, kind: str, workers: int, tmp_path: Path, capsys: Capture
) -> None:
    """Both directions, also in forked processes; the local file is what a copy would have given."""
    base, some = urls(folders, kind), ("--workers", workers, "--shard-size", "400kB")
    for way, name in (("from-hf", "hf"), ("to-hf", "run"), ("to-hf", "run/checkpoints/iter_0000005")):
        url = f"{base}/{name}"
        assert command("convert", way, url, tmp_path / "a", *some) == 0
        assert command("convert", way, folders / name, tmp_path / "b", *some) == 0
        a, b = digest(tmp_path / "a"), digest(tmp_path / "b")
        assert json.loads(a.pop("nemotron3_manifest.json"))["source"].startswith(
            str(folders) if kind == "file" else url
        )
        del b["nemotron3_manifest.json"]
        assert a == b and len(a) > 4
        assert command("convert", "verify", url, tmp_path / "a", *ONE) == 0
        for full in ([], ["--full"]):
            assert command("check", url, *full) == 0
        out, _ = capsys.readouterr()
        assert "nemotron3-remote" not in out and (kind == "file" or url in out)
        shutil.rmtree(tmp_path / "a")
        shutil.rmtree(tmp_path / "b")


def test_only_ranges_are_fetched(folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file with tensors is copied to the disk, or read at once, or read twice."""
    asked: list[tuple[str, int]] = []
    fetch = remote._fetch

    def counted(url: str, name: str, path: Path, offset: int, length: int) -> bytes:
        asked.append((path.name, length))
        assert not path.exists() or path.stat().st_blocks * 512 < 64 << 10
        return fetch(url, name, path, offset, length)

    monkeypatch.setattr(remote, "_fetch", counted)
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    assert command("convert", "to-hf", "memory://bucket/run", tmp_path / "out", *ONE) == 0
    [file] = (folders / "run/checkpoints/release").glob("*.distcp")
    size = file.stat().st_size
    lengths = [length for name, length in asked if name == file.name]
    assert max(lengths) < size / 4 and sum(lengths) < 2 * size
    assert [name for name, _ in asked].count(".metadata") == 1  # of the iteration that is needed


def test_damage_is_found(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    """A flipped byte and a cut file, by name of the URL."""
    memory = fsspec.filesystem("memory")
    [file] = (folders / "run/checkpoints/release").glob("*.distcp")
    url, data = f"/bucket/run/checkpoints/release/{file.name}", file.read_bytes()
    try:
        changed = bytearray(data)
        changed[len(data) // 3] ^= 1
        for content, words in ((bytes(changed), ["--full"]), (data[:-100], [])):
            memory.pipe_file(url, content)
            assert command("check", "memory://bucket/run", *words) == 2
            out, err = capsys.readouterr()
            assert f"memory://bucket/run/checkpoints/release/{file.name}" in err
            assert command("convert", "to-hf", "memory://bucket/run", tmp_path / "out", *ONE) == 2
            assert not (tmp_path / "out").exists() and "nemotron3-remote" not in out + err
            capsys.readouterr()
            shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
    finally:
        memory.pipe_file(url, data)


def test_errors(folders: Path, capsys: Capture, tmp_path: Path) -> None:
    for url, message in (
        ("memory://bucket/none", "memory://bucket/none: it does not exist"),
        ("nosuch://bucket/run", "nosuch://bucket/run: "),
        ("memory://bucket/hf/config.json", "is not a folder"),
        ("memory://bucket", "there is no checkpoint in it"),
        ("reference://x", "reference://x: it cannot be opened: TypeError("),
        ("dir://x", "dir://x: it cannot be opened: AttributeError("),
        ("jlab://x", "jlab://x: it cannot be opened: TypeError("),
        ("zip://x::hf", "zip://x::hf: it cannot be opened: "),
        ("HF://x/y", "HF://x/y: it cannot be opened: ValueError('Protocol not known"),
        ("dir:///", "dir:/// names no folder: write it behind ://"),
    ):
        assert command("check", url) == 2
        out, err = capsys.readouterr()
        assert message in err and "Traceback" not in err and err.count("\n") == 1, err
    assert command("convert", "to-hf", "memory://bucket/run", "memory://") == 2
    assert "memory:// names no folder" in capsys.readouterr().err
    for way, name in (("to-hf", "run"), ("from-hf", "hf")):
        assert command("convert", way, f"memory://bucket/{name}", "memory://x") == 2
        assert "memory://x: its files end with this command: give a folder" in capsys.readouterr().err
    assert command("convert", "from-hf", "memory://bucket/run", tmp_path / "x") == 2
    assert "use `nemotron3 convert to-hf`" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["memory://", pytest.param("local://", marks=pytest.mark.full)])
def test_what_is_written_is_the_same(
    folders: Path, scheme: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directions, read back through the URL and compared with a local conversion."""
    monkeypatch.setattr(remote, "_MEMORY", "another://")  # this process goes on
    base = f"{scheme}{tmp_path}/there"
    store = fsspec.filesystem(scheme.rstrip(":/"))
    for way, name in (("from-hf", "hf"), ("to-hf", "run")):
        some = ("--shard-size", "400kB", *ONE)
        assert command("convert", way, folders / name, f"{base}/{way}", *some) == 0
        assert command("convert", way, folders / name, tmp_path / way, *some) == 0
        store.get(f"{tmp_path}/there/{way}", str(tmp_path / f"{way}-back"), recursive=True)
        assert digest(tmp_path / f"{way}-back") == digest(tmp_path / way)
        assert command("convert", "verify", f"{base}/{way}", folders / name, *ONE) == 0
        assert command("convert", "verify", f"{base}/{way}", *ONE) == 0  # the manifest
        assert command("check", f"{base}/{way}", "--full") == 0
        capsys.readouterr()
        assert command("convert", way, folders / name, f"{base}/{way}", *some) == 2
        assert f"{base}/{way}: it exists" in capsys.readouterr().err
        assert command("convert", way, folders / name, f"{base}/dry", "--dry-run") == 0
        out = capsys.readouterr().out
        assert f"{base}/dry: " in out and "are free" not in out and not store.exists(f"{tmp_path}/there/dry")


def test_an_interrupted_upload(
    folders: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no checkpoint yet; the same command continues, another one is refused."""
    from megatron_nemotron3.checkpoints.convert import upload

    monkeypatch.setattr(remote, "_MEMORY", "another://")  # this process goes on
    files = 1
    url = f"memory://half/{files}"
    some = ("convert", "to-hf", folders / "run", url, "--shard-size", "300kB", *ONE)
    write_parts, made = upload.write_parts, []

    def failing(plan: object, *rest: object, **options: object) -> object:
        made.append(plan)
        if len(made) == files + 1:
            raise ValueError("the connection is lost")
        return write_parts(plan, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(upload, "write_parts", failing)
    assert command(*some) == 2
    assert "the connection is lost" in capsys.readouterr().err
    assert command("check", url) == 2
    monkeypatch.setattr(upload, "write_parts", write_parts)
    assert command(*some[:4], "--shard-size", "200kB") == 2
    assert "an interrupted conversion is there" in capsys.readouterr().err
    before = len(made)
    monkeypatch.setattr(upload, "write_parts", lambda *a, **k: (made.append(a), write_parts(*a, **k))[1])
    assert command(*some) == 0
    assert (
        command("convert", "verify", url, folders / "run", *ONE) == 0
        and command("convert", "verify", url, *ONE) == 0
    )
    total = len([n for n in fsspec.filesystem("memory").ls(f"/half/{files}", detail=False) if "model-" in n])
    assert len(made) - before == total - files > 0


def test_generate_from_a_url(folders: Path, capsys: Capture) -> None:
    words = ("memory://bucket/hf", "--prompt", "a", "--device", "cpu")
    assert command("generate", *words) == 2
    assert "memory://bucket/hf: no tokenizer found" in capsys.readouterr().err


@pytest.fixture
def cache(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with one repository, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--nvidia--NVIDIA-Nemotron-3-Nano"
    snapshot = repository / "snapshots/abc123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc123")
    for file in (folders / "hf").iterdir():
        shutil.copy(file, repository / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    return repository


def test_an_id_is_found_in_the_cache(cache: Path, tmp_path: Path, capsys: Capture) -> None:
    name = "nvidia/NVIDIA-Nemotron-3-Nano"
    assert command("convert", "from-hf", name, tmp_path / "out", *ONE) == 0
    assert command("convert", "verify", name, tmp_path / "out", *ONE) == 0
    next(cache.glob("blobs/*.safetensors")).unlink()  # an interrupted download
    for missing in (name, "nvidia/other"):
        assert command("check", missing) == 2
        err = capsys.readouterr().err
        assert f"{missing}: no such folder is here, and as a Hugging Face id it is neither in" in err


def test_a_path_is_never_looked_up(
    cache: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command("check", "runs/demo") == 2
    assert capsys.readouterr().err == "nemotron3 check: runs/demo: it does not exist\n"


def test_a_plan_reads_an_id_without_a_download(
    folders: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = remote._opened
    monkeypatch.setattr(remote, "_opened", lambda url: opened(url.replace("hf://", "memory://")))
    monkeypatch.setattr(remote, "_snapshot", lambda name: pytest.fail("downloaded"))
    words = ["--conversations", "none", "--output", "none", "--plan", "--gpu", "h100"]
    assert command("finetune", "bucket/hf", *words) == 0
    assert "bucket/hf: all weights, 1 rank, bf16" in capsys.readouterr().out
    assert command("show", "bucket/hf") == 0
    out = capsys.readouterr().out
    assert re.search(r"^stored     [\d,]+ bytes of bfloat16\nstored     [\d,]+ bytes of float32$", out, re.M)
    assert command("finetune", "nonsense", *words) == 2
    assert "nonsense" in capsys.readouterr().err
