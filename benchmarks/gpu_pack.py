"""What gpu.py needs on a machine without a package index: folders of wheels, each of limited size.

    python benchmarks/gpu_pack.py build/gpu-pack [--wheel FILE ...] [--cuda 13] [--have FILE]
    python3 benchmarks/gpu.py --packages build/gpu-pack      # there; needs no network, but torch and pip

Runs where there is an index and gathers for Linux, x86-64, Python 3.12: megatron-core, transformers, and
all that they and the tests need but torch's own packages; the Python and Triton sources of mamba-ssm and
causal-conv1d, which suffice for the scan. What is on the index as source only and needs CUDA to be compiled
is given as a wheel: --wheel of causal-conv1d takes the place of its sources, --wheel of transformer-engine-
torch brings TransformerEngine. Its core library is built for CUDA 12 or 13: --cuda gives that of the
target's torch, and installing compares them.

--have is what `pip freeze` prints on the target machine: what it names is left out, but for megatron-core and
transformers. Each folder is for one transfer; a file that is larger is cut, and put together there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import MIB, parser

PYTHON = "3.12"
#: Newest first; pip takes a tag only if it is named.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
TORCH = "torch==2.11.0"
#: Taken even if the target machine has another version.
PINNED = ("megatron-core[training]==0.19.2", "transformers==5.23.0")
#: Of the tests and benchmarks.
NEEDED = ("einops", "hypothesis", "pytest", "pytest-xdist", "safetensors", "tokenizers", "numpy", "psutil")
#: Of TransformerEngine, whose own wheels are taken without their needs: those name other builds, too.
TE_NEEDED = ("onnx", "onnxscript", "pydantic", "nvdlfw-inspect", "nvidia-cudnn-frontend>=1.29.0")
TE_VERSION = "2.20.2"
#: Compilers of other kernels, 180 MB: cudnn-frontend requires them, TransformerEngine calls none on SM 9.0.
UNUSED = "nvidia-cutlass-dsl"
#: Source archive -> (folder that is used, name of its compiled module, of which an empty one stands in).
SOURCES = {
    "mamba-ssm==2.3.2.post1": ("mamba_ssm", "selective_scan_cuda"),
    "causal-conv1d==1.7.0": ("causal_conv1d", "causal_conv1d_cuda"),
}
#: Bytes of a folder: transfers of 64 MiB carry the checkout, too.
PART = 52 * MIB


def normal(name: str) -> str:
    """The name of a distribution or a requirement as packaging compares it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name)[0]).lower()


def pip(*words: str, check: bool = True) -> None:
    """Run pip. Raises RuntimeError with its last lines."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    # The metadata step of SOURCES would look for a CUDA toolkit.
    skip = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **skip})
    if check and done.returncode:
        raise RuntimeError(f"pip {words[0]} failed: {' '.join(done.stderr.split())[-400:]}")


def target_options() -> list[str]:
    """Options with which pip looks for wheels of the target machine."""
    options = ["--quiet", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    return options + [word for platform in PLATFORMS for word in ("--platform", platform)]


def missing(report: Mapping[str, Any], have: Iterable[str]) -> list[str]:
    """NAME==VERSION of what a resolved report installs, without torch and all that it needs, and `have`."""
    packages = {normal(item["metadata"]["name"]): item["metadata"] for item in report["install"]}
    torch, todo = set[str](), ["torch"]
    while todo:
        name = todo.pop()
        if name in packages and name not in torch:
            torch.add(name)
            # torch asks for its CUDA libraries by extras of a package that only names them.
            needs = packages[name].get("requires_dist", ())
            todo += [normal(n) for n in needs if name.startswith("cuda-") or "extra ==" not in n]
    pinned = {normal(name) for name in PINNED}
    # What both need is torch's, unless it was asked for by name.
    left = {name for name in packages if name not in torch} | (pinned | {*map(normal, NEEDED)}) & {*packages}
    left -= {normal(name) for name in have} - pinned
    left = {name for name in left if not name.startswith(UNUSED)}
    return [f"{name}=={packages[name]['version']}" for name in sorted(left - {"torch"})]


def gather(folder: Path, wheels: Sequence[Path], have: Iterable[str], cuda: str) -> None:
    """Download everything into `folder`.

    Raises:
        RuntimeError: pip failed.
    """
    given = {normal(wheel.name.split("-")[0]) for wheel in wheels}
    te = "transformer-engine-torch" in given
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.json"
        wanted = [TORCH, *PINNED, *NEEDED, *(TE_NEEDED if te else ())]
        dry = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
        pip(*dry, "--target", str(Path(made) / "none"), *target_options(), *wanted)
        names = missing(json.loads(report.read_text()), have)
        if te:
            names += [f"transformer-engine=={TE_VERSION}", f"transformer-engine-cu{cuda}=={TE_VERSION}"]
        for wheel in wheels:
            shutil.copy(wheel, folder)
        pip("download", "--no-deps", *target_options(), "-d", str(folder), *names)
        for requirement in SOURCES:
            if normal(requirement) in given:
                continue
            words = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
            pip(*words, "-d", str(folder), requirement, check=False)
            if not list(folder.glob(f"{normal(requirement).replace('-', '_')}-*.tar.gz")):
                raise RuntimeError(f"pip did not download the sources of {requirement}")


def divide(folder: Path, size: int = PART) -> None:
    """Move the files into folders part00, part01, … of at most `size` bytes; larger files are cut.

    The pieces of a file are NAME.00of06 and so on.
    """
    number, free = 0, size
    for path in sorted(folder.iterdir()):
        pieces = -(-path.stat().st_size // size)
        with path.open("rb") as file:
            for piece in range(pieces):
                data = file.read(size)
                if len(data) > free:
                    number, free = number + 1, size
                part = folder / f"part{number:02}"
                part.mkdir(exist_ok=True)
                free -= len(data)
                name = path.name if pieces == 1 else f"{path.name}.{piece:02}of{pieces:02}"
                (part / name).write_bytes(data)
        path.unlink()


def join(folder: Path, into: Path) -> None:
    """Copy the files of a pack, those that were cut as one again.

    Raises:
        ValueError: a piece is missing.
    """
    files = {path.name: path for path in folder.glob("part*/*")}
    for name, path in files.items():
        match = re.fullmatch(r"(.+)\.\d\dof(\d\d)", name)
        if not match:
            shutil.copy(path, into)
        elif not (into / match[1]).exists():
            with (into / match[1]).open("wb") as file:
                for piece in (f"{match[1]}.{number:02}of{match[2]}" for number in range(int(match[2]))):
                    if piece not in files:
                        raise ValueError(f"{folder}: {piece} is missing: carry every folder of the pack")
                    file.write(files[piece].read_bytes())


def install(folder: Path, site: Path) -> dict[str, list[str]]:
    """Install a pack into the folder `site`, once; return what is to be put in front of which variable.

    Raises:
        ValueError: there is no pack, a part is missing, or TransformerEngine is for another CUDA than torch.
        RuntimeError: pip failed; a damaged wheel has a wrong checksum.
    """
    if not (folder / "part00").is_dir():
        raise ValueError(f"{folder} has no folder part00: it is no pack, or was not carried")
    torch = torch_folder()
    if (te := sorted(folder.glob("part*/transformer_engine_cu*"))) and (
        here := cuda_of_torch(torch)
    ) is not None:
        made_for = te[0].name.removeprefix("transformer_engine_cu").split("-")[0]
        if here.split(".")[0] != made_for:
            raise ValueError(
                f"TransformerEngine is for CUDA {made_for}, torch for {here}: use another --cuda"
            )
    if not site.exists():
        site.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=site.parent) as made:
            whole, target = Path(made, "whole"), Path(made, "site")
            whole.mkdir()
            join(folder, whole)
            quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile"]
            pip("install", *quiet, "--target", str(target), *map(str, sorted(whole.glob("*.whl"))))
            for package, compiled in SOURCES.values():
                for archive in whole.glob(f"{package}-*.tar.gz"):
                    with tarfile.open(archive) as file:
                        file.extractall(whole, filter="data")
                    (found,) = whole.glob(f"*/{package}")
                    shutil.copytree(found, target / package)
                    (target / f"{compiled}.py").write_text('"""Stands in for a compiled module."""\n')
            os.rename(target, site)
    # TransformerEngine loads libraries that are torch's.
    libraries = [*sorted(torch.parent.glob("nvidia/*/lib")), torch / "lib"] if torch else []
    return {"PYTHONPATH": [str(site.absolute())], "LD_LIBRARY_PATH": [str(path) for path in libraries]}


def torch_folder() -> Path | None:
    """Where the torch of this interpreter is, without importing it."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def cuda_of_torch(torch: Path | None) -> str | None:
    """The CUDA version that torch was built for, such as 13.0; None without torch or without CUDA."""
    if torch is None or not (torch / "version.py").is_file():
        return None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def main() -> int:
    options = parser(__doc__)
    options.add_argument("pack", type=Path)
    options.add_argument(
        "--wheel", type=Path, action="append", default=[], help="compiled for the target; can be repeated"
    )
    options.add_argument("--cuda", choices=("13", "12"), default="13", help="of the target's torch")
    options.add_argument("--have", type=Path, help="what `pip freeze` prints on the target machine")
    args = options.parse_args()
    try:
        for wheel in args.wheel:
            if not wheel.is_file():
                raise ValueError(f"{wheel} is no file")
        lines = args.have.read_text().splitlines() if args.have else []
        have = [line.strip() for line in lines if re.match(r"[A-Za-z]", line.strip())]
        args.pack.mkdir(parents=True)
        gather(args.pack, args.wheel, have, args.cuda)
        divide(args.pack)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"gpu_pack.py: {error}", file=sys.stderr)
        return 2
    for part in sorted(args.pack.iterdir()):
        sizes = [path.stat().st_size for path in part.iterdir()]
        print(f"{part}: {len(sizes)} files, {sum(sizes) / MIB:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
