"""Packs for a GPU machine without a package index (benchmarks/gpu_pack.py), of small wheels made here."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # it imports its neighbor `common`
import gpu_pack

PART = 4000


def wheel(folder: Path, name: str, code: str) -> None:
    """A wheel with one module, which is not compressed."""
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


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Two wheels, of which one is divided, and the sources of a package."""
    folder = tmp_path / "pack"
    folder.mkdir()
    wheel(folder, "first", "VALUE = 1\n")
    wheel(folder, "second", "VALUE = 2\n" + "# long\n" * 1200)
    sources = tmp_path / "causal_conv1d-1.7.0" / "causal_conv1d"
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text("import causal_conv1d_cuda\n")
    with tarfile.open(folder / "causal_conv1d-1.7.0.tar.gz", "w:gz") as archive:
        archive.add(sources.parent, "causal_conv1d-1.7.0")
    gpu_pack.divide(folder, PART)
    return folder


def test_what_was_packed_can_be_used(pack: Path, tmp_path: Path) -> None:
    pieces = sorted(path.name for path in pack.glob("*/second*"))
    assert pieces == [f"second-1.0-py3-none-any.whl.{n:02}of03" for n in range(3)]
    parts = sorted(pack.iterdir())
    assert [part.name for part in parts] == [f"part{n:02}" for n in range(len(parts))] and len(parts) > 2
    assert all(sum(path.stat().st_size for path in part.iterdir()) <= PART for part in parts)
    site = tmp_path / "space here" / "site"
    variables = gpu_pack.install(pack, site)
    assert variables["PYTHONPATH"] == [str(site)] and variables["LD_LIBRARY_PATH"][-1].endswith("torch/lib")
    code = "import first, second, causal_conv1d; print(first.VALUE + second.VALUE)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "3\n", done.stderr
    assert list(site.parent.iterdir()) == [site]
    for path in pack.glob("*/*"):
        path.unlink()
    assert gpu_pack.install(pack, site) == variables  # once


@pytest.mark.parametrize("case", ["missing", "damaged", "none"])
def test_what_is_wrong_is_said_before_anything_is_made(pack: Path, tmp_path: Path, case: str) -> None:
    (part,) = pack.glob("*/second-1.0-py3-none-any.whl.01of03")
    if case == "missing":
        part.unlink()
        message = "01of03 is missing: carry every folder"
    elif case == "damaged":
        data = bytearray(part.read_bytes())
        data[10] ^= 1
        part.write_bytes(data)
        message = "pip install failed"
    else:
        pack, message = tmp_path / "none", "is no pack, or was not carried"
    with pytest.raises((ValueError, RuntimeError), match=message):
        gpu_pack.install(pack, tmp_path / "gpu" / "site")
    assert not (tmp_path / "gpu" / "site").exists()


def test_transformer_engine_is_for_the_cuda_of_torch(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core library is published for 12 and for 13; a pack without it does not depend on that."""
    torch = tmp_path / "torch"
    torch.mkdir()
    monkeypatch.setattr(gpu_pack, "torch_folder", lambda: torch)
    monkeypatch.setattr(gpu_pack, "pip", lambda *words: Path(words[words.index("--target") + 1]).mkdir())
    other = pack / "part00" / "transformer_engine_cu13-2.20.2-py3-none-manylinux_2_28_x86_64.whl.00of01"
    for number, (text, problem) in enumerate(
        (
            ("cuda: Optional[str] = '12.8'\n", "is for CUDA 13, torch for 12.8: use another --cuda"),
            ("__all__ = ['cuda']\ncuda: Optional[str] = '13.0'\n", None),
            ("cuda: Optional[str] = None\n", None),
        )
    ):
        (torch / "version.py").write_text(text)
        gpu_pack.install(pack, tmp_path / f"without{number}")
        other.touch()
        with pytest.raises(ValueError, match=problem) if problem else contextlib.nullcontext():
            gpu_pack.install(pack, tmp_path / f"with{number}")
        other.unlink()


def test_a_part_travels_with_the_checkout() -> None:
    """A transfer of 64 MiB carries the tracked files, too, and they grow."""
    root = Path(gpu_pack.__file__).parents[1]
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    files = [root / name for name in listed.stdout.split("\0") if name]
    tracked = sum(file.stat().st_size for file in files if file.is_file())
    assert gpu_pack.PART + tracked <= 64 * 2**20 - 2**20


def test_torch_and_what_is_there_are_left_out() -> None:
    """What only torch needs and unused compilers stay out; what was asked for or is newer here does not."""
    needs = {
        "torch": ["cuda-toolkit[cublas]==13", "numpy", 'pandas; extra == "all"'],
        "cuda-toolkit": ['nvidia-cublas==13; extra == "cublas"'],
        "nvidia-cublas": [],
        "numpy": [],
        "megatron_core": ["torch", "einops", "pandas"],
        "einops": ["nvidia-cutlass-dsl"],
        "nvidia-cutlass-dsl": ["nvidia-cutlass-dsl-libs-cu13"],
        "nvidia-cutlass-dsl-libs-cu13": [],
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
    have = ["Einops==0.7", "numpy @ file:///x", "megatron.core==0.18"]
    assert gpu_pack.missing(report, have) == ["megatron-core==1", "pandas==1", "transformers==1"]


def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, message in (
        ([str(tmp_path)], "File exists"),
        ([str(tmp_path / "new"), "--wheel", str(tmp_path / "none")], "none is no file"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_pack.py", *words])
        assert gpu_pack.main() == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_compiled_wheel_takes_the_place_of_the_sources(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources are neither downloaded nor installed, and no module stands in for what it compiled."""
    asked: list[tuple[str, ...]] = []

    def pip(*words: str, check: bool = True) -> None:
        asked.append(words)
        if "--report" in words:
            Path(words[words.index("--report") + 1]).write_text('{"install": []}')
        elif not check:  # the sources of mamba-ssm
            (folder / "mamba_ssm-2.3.2.post1.tar.gz").touch()

    wheel(tmp_path, "causal_conv1d", "VALUE = 3\n")
    folder = tmp_path / "gathered"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_pack, "pip", pip)
        gpu_pack.gather(folder, [tmp_path / "causal_conv1d-1.0-py3-none-any.whl"], [], "13")
    assert not any("causal-conv1d" in " ".join(words) for words in asked)
    assert {path.name for path in folder.iterdir()} == {
        "causal_conv1d-1.0-py3-none-any.whl",
        "mamba_ssm-2.3.2.post1.tar.gz",
    }
    for path in pack.glob("*/causal_conv1d*"):
        path.unlink()
    (pack / "part00" / "causal_conv1d-1.0-py3-none-any.whl").write_bytes(
        (folder / "causal_conv1d-1.0-py3-none-any.whl").read_bytes()
    )
    gpu_pack.install(pack, tmp_path / "site")
    assert (tmp_path / "site" / "causal_conv1d.py").exists()
    assert not (tmp_path / "site" / "causal_conv1d_cuda.py").exists()
