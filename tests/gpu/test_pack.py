"""Packs for a GPU machine without a package index (benchmarks/gpu_pack.py), of small wheels made here."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_pack

PART = 4000


def wheel(folder: Path, name: str, code: str) -> None:
    """A wheel with one module."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        value = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={value},{len(text)}\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups, each in several parts."""
    made = tmp_path_factory.mktemp("made")
    wheel(made / "wheels", "first", "VALUE = 1\n" + "# long\n" * 500)
    wheel(made / "te" / "wheels", "second", "VALUE = 2\n" + "# long\n" * 500)
    sources = made / "sources"
    (sources / "third").mkdir(parents=True)
    (sources / "third" / "__init__.py").write_text("import third_compiled\n")
    (sources / "third_compiled.py").write_text("")
    (made / "benchmarks").mkdir()
    (made / "benchmarks" / "gpu.py").write_text("print('measured')\n")
    checkout = made / "checkout.tar"
    with tarfile.open(checkout, "w") as archive:
        archive.add(made / "benchmarks", "benchmarks")
    folder = made / "pack"
    groups = {"base": [made / "wheels", sources, checkout], "te": [made / "te" / "wheels"]}
    gpu_pack.write_pack(groups, folder, PART)
    return folder


def copy(pack: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in pack.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def unpacked(pack: Path, into: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """By the program in the pack, as on the target machine."""
    command = [sys.executable, str(pack / "gpu_pack.py"), "unpack", str(pack), "--into", str(into), *words]
    return subprocess.run(command, capture_output=True, text=True)


def shell(into: Path, code: str) -> str:
    words = ["bash", "-c", f'. "{into}/env.sh" && cd "{into}/checkout" && {code}']
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    return done.stdout + done.stderr


def test_what_was_packed_can_be_used(pack: Path, tmp_path: Path) -> None:
    parts = sorted(path.name for path in pack.glob("*.tar.*"))
    assert parts[0] == "base.tar.00" and "te.tar.01" in parts and len(parts) > 4
    assert all(path.stat().st_size <= PART for path in pack.glob("*.tar.*"))
    into = tmp_path / "space here" / "gpu"
    done = unpacked(pack, into)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f". {into}/env.sh && cd {into}/checkout && make gpu\n"
    python = sys.executable
    code = "import first, second, third; print(first.VALUE + second.VALUE)"
    assert shell(into, f"{python} -c '{code}' && {python} benchmarks/gpu.py") == "3\nmeasured\n"
    assert sorted(path.name for path in into.iterdir()) == ["checkout", "env.sh", "site"]
    assert list(into.parent.iterdir()) == [into]
    again = unpacked(pack, into)
    assert again.returncode == 2 and "exists: give another folder" in again.stderr


def _damage(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[10] ^= 1
    part.write_bytes(data)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("te.tar.01", Path.unlink, "te.tar.01 is missing: carry it, too, or unpack with --groups base"),
        ("base.tar.01", _damage, "base.tar.01 is damaged"),
        ("MANIFEST.json", Path.unlink, "has no MANIFEST.json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    pack: Path, tmp_path: Path, part: str, change: Callable[[Path], None], message: str
) -> None:
    mine = copy(pack, tmp_path / "pack")
    change(mine / part)
    done = unpacked(mine, tmp_path / "gpu")
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "gpu").exists()


def test_torch_and_what_is_there_are_left_out() -> None:
    """Packages that only torch needs stay out; what was asked for by name or is newer here does not."""
    needs = {
        "torch": ["cuda-toolkit[cublas]==13", "numpy", 'pandas; extra == "all"'],
        "cuda-toolkit": ['nvidia-cublas==13; extra == "cublas"'],
        "nvidia-cublas": [],
        "numpy": [],
        "megatron_core": ["torch", "einops", "pandas"],
        "einops": [],
        "pandas": [],
        "transformers": ["numpy"],
    }
    install = [
        {"metadata": {"name": name, "version": "1", "requires_dist": wants}} for name, wants in needs.items()
    ]
    report = json.loads(json.dumps({"install": install}))
    assert gpu_pack.missing(report, []) == [
        f"{name}==1" for name in ("einops", "megatron-core", "numpy", "pandas", "transformers")
    ]
    have = gpu_pack.names_of("# freeze\nEinops==0.7\nnumpy @ file:///x\n-e git+x\nmegatron.core==0.18\n\n")
    assert have == ["Einops", "numpy", "megatron.core"]
    assert gpu_pack.missing(report, have) == ["megatron-core==1", "pandas==1", "transformers==1"]
