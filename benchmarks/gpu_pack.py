"""What `make gpu` needs on a machine without a package index, as parts of limited size.

    python benchmarks/gpu_pack.py make build/gpu-pack [--te-wheel FILE [--cuda 13]] [--have FILE]
    python3 gpu_pack.py unpack build/gpu-pack --into DIR [--groups base]    # needs no network
    . DIR/env.sh && cd DIR/checkout && make gpu

`make` runs where there is an index, in an environment with torch, and gathers for Linux, x86-64, Python 3.12:

base    megatron-core, transformers, and all that they and the tests need but torch's own packages; the Python
        and Triton sources of mamba-ssm and causal-conv1d, which suffice for the scan; a wheel and an archive
        of this checkout
te      TransformerEngine, and what it needs besides. Its extension for torch is on the index as source only,
        and compiling it needs CUDA: --te-wheel gives a wheel, without it this group is left out. Its core
        library is built for CUDA 12 or 13: --cuda gives that of the target's torch, `unpack` compares them

--have is what `pip freeze` prints on the target machine: what it names is left out, but for megatron-core and
transformers. A group is one tar file, divided into parts; MANIFEST.json has their SHA-256. `unpack` checks
them and installs into a folder of its own. This program is copied into the pack; it needs pip there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.12"
#: Newest first; pip takes a tag only if it is named.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
TORCH = "torch==2.11.0"
#: Installed even if the target machine has another version.
PINNED = ("megatron-core[training]==0.19.2", "transformers==5.23.0")
#: Of the tests and benchmarks.
NEEDED = ("einops", "hypothesis", "pytest", "pytest-xdist", "safetensors", "tokenizers", "numpy", "psutil")
#: Of TransformerEngine, whose own wheels are taken without their needs: those name other builds, too.
TE_NEEDED = ("onnx", "onnxscript", "pydantic", "nvdlfw-inspect", "nvidia-cudnn-frontend>=1.29.0")
TE_VERSION = "2.20.2"
#: Major versions of CUDA that its core library is published for; that of torch on the index is the default.
CUDA = ("13", "12")
#: Source archive -> (folder that is used, name of its compiled module, of which an empty one stands in).
SOURCES = {
    "mamba-ssm==2.3.2.post1": ("mamba_ssm", "selective_scan_cuda"),
    "causal-conv1d==1.7.0": ("causal_conv1d", "causal_conv1d_cuda"),
}
MANIFEST = "MANIFEST.json"
MIB = 2**20
#: Of a part: transfers of 64 MiB carry the checkout, too.
PART = 52 * MIB


def size(text: str) -> int:
    """Bytes: 55M, 900K, 1000."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give 55M or 900K")
    return int(match[1]) * 1024 ** " KMG".index(match[2] or " ")


def normal(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# --- gathering ----------------------------------------------------------------------------------------


def pip(*words: str, check: bool = True, **environment: str) -> None:
    """Run pip. Raises RuntimeError with its last lines."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if check and done.returncode:
        raise RuntimeError(f"pip {words[0]} failed: {' '.join(done.stderr.split())[-400:]}")


def target_options() -> list[str]:
    """Options with which pip looks for wheels of the target machine."""
    options = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    return options + [word for platform in PLATFORMS for word in ("--platform", platform)]


def resolve(folder: Path, *more: str) -> dict[str, Any]:
    """pip's report of what an empty machine would install, with more requirements."""
    report = folder / "report.json"
    words = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
    pip(*words, "--target", str(folder / "none"), *target_options(), TORCH, *PINNED, *NEEDED, *more)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def missing(report: Mapping[str, Any], have: Iterable[str]) -> list[str]:
    """NAME==VERSION of what a resolved report installs, without torch and all that it needs, and `have`."""
    metadata = {normal(item["metadata"]["name"]): item["metadata"] for item in report["install"]}
    torch, todo = set[str](), ["torch"]
    while todo:
        name = todo.pop()
        if name in metadata and name not in torch:
            torch.add(name)
            # torch asks for its CUDA libraries by extras of a package that only names them.
            needs = metadata[name].get("requires_dist", ())
            cuda = name.startswith("cuda-")
            todo += [
                normal(re.split(r"[^\w.-]", need)[0]) for need in needs if cuda or "extra ==" not in need
            ]
    pinned = {normal(re.split(r"[^\w.-]", name)[0]) for name in (*PINNED, *NEEDED)}
    # What both need is torch's, unless it was asked for by name.
    left = {name for name in metadata if name not in torch or name in pinned}
    always = {normal(re.split(r"[^\w.-]", name)[0]) for name in PINNED}
    left -= {normal(name) for name in have} - always
    return [f"{name}=={metadata[name]['version']}" for name in sorted(left - {"torch"})]


def names_of(freeze: str) -> list[str]:
    """Names in the output of `pip freeze` or `pip list`."""
    lines = (line.strip() for line in freeze.splitlines())
    return [re.split(r"[=@\s]", line)[0] for line in lines if re.match(r"[A-Za-z]", line)]


def download_sources(folder: Path) -> Path:
    """The folders of `SOURCES`, with empty modules for what would have to be compiled."""
    made = folder / "sources"
    made.mkdir()
    # Their metadata step looks for a CUDA toolkit; it may fail once the archive is there.
    skip = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
    for requirement, (package, compiled) in SOURCES.items():
        words = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        pip(*words, "-d", str(folder / package), requirement, check=False, **skip)
        archives = list((folder / package).glob("*.tar.gz")) if (folder / package).exists() else []
        if len(archives) != 1:
            raise RuntimeError(f"pip did not download the sources of {requirement}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder / package, filter="data")
        (found,) = (folder / package).glob(f"*/{package}")
        shutil.copytree(found, made / package)
        (made / f"{compiled}.py").write_text('"""Stands in for a compiled module."""\n')
    return made


def transformer_engine(cuda: str) -> tuple[str, str]:
    """TransformerEngine without its extension for torch."""
    return f"transformer-engine=={TE_VERSION}", f"transformer-engine-cu{cuda}=={TE_VERSION}"


def gather(
    folder: Path, te_wheel: Path | None, have: Iterable[str], cuda: str = CUDA[0]
) -> dict[str, list[Path]]:
    """Group -> files and folders, downloaded into `folder`.

    Raises:
        RuntimeError: pip failed.
    """
    wheels, te = folder / "wheels", folder / "te" / "wheels"
    own = missing(resolve(folder), have)
    _download(wheels, own)
    pip("wheel", "--quiet", "--no-deps", "-w", str(wheels), str(ROOT))
    checkout = folder / "checkout.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(checkout), "HEAD"], check=True)
    groups = {"base": [wheels, download_sources(folder), checkout]}
    if te_wheel is not None:
        needed = set(missing(resolve(folder, *TE_NEEDED), have)) - set(own)
        _download(te, [*transformer_engine(cuda), *sorted(needed)])
        shutil.copy(te_wheel, te)
        groups["te"] = [te]
    return groups


def _download(folder: Path, requirements: Sequence[str]) -> None:
    pip("download", "--quiet", "--no-deps", *target_options(), "-d", str(folder), *requirements)


# --- parts --------------------------------------------------------------------------------------------


def write_pack(
    groups: Mapping[str, Sequence[Path]], folder: Path, part_size: int, cuda: str = CUDA[0]
) -> dict[str, Any]:
    """Write each group as one tar file in parts, with a manifest and this program.

    Args:
        groups: name -> files and folders, which keep their own names.
        folder: does not exist yet, or is empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {"python": PYTHON, "cuda": cuda, "groups": {}}
    for name, paths in groups.items():
        with tempfile.TemporaryFile(dir=folder) as whole:
            with tarfile.open(fileobj=whole, mode="w") as archive:
                for path in paths:
                    archive.add(path, path.name)
            whole.seek(0)
            parts = []
            while block := whole.read(part_size):
                part = folder / f"{name}.tar.{len(parts):02}"
                part.write_bytes(block)
                parts.append({"name": part.name, "bytes": len(block), "sha256": digest(part)})
        manifest["groups"][name] = parts
    shutil.copy(__file__, folder / "gpu_pack.py")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(folder: Path, groups: Sequence[str]) -> dict[str, list[Path]]:
    """The parts of some groups, or of all, after comparing their checksums.

    Raises:
        ValueError: there is no pack, no such group, a part is missing or damaged, or TransformerEngine is for
            another CUDA than the torch that is here.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: it is no pack, or the file was not carried")
    manifest = json.loads((folder / MANIFEST).read_text())
    known, made_for, here = manifest["groups"], manifest["cuda"], cuda_of_torch()
    if unknown := [name for name in groups if name not in known]:
        raise ValueError(f"the pack has no group {unknown[0]!r}: use {', '.join(known)}")
    if "te" in (groups or known) and here is not None and here.split(".")[0] != made_for:
        raise ValueError(
            f"TransformerEngine in this pack is for CUDA {made_for}, the torch here for {here}: make the "
            f"pack with --cuda {here.split('.')[0]}, or unpack with --groups base"
        )
    found: dict[str, list[Path]] = {}
    for name in groups or known:
        for part in known[name]:
            path = folder / part["name"]
            if not path.is_file():
                others = " ".join(g for g in known if g != name)
                raise ValueError(f"{path} is missing: carry it, too, or unpack with --groups {others}")
            if digest(path) != part["sha256"]:
                raise ValueError(f"{path} is damaged: its SHA-256 is not that of {MANIFEST}; carry it again")
            found.setdefault(name, []).append(path)
    return found


def unpack(folder: Path, into: Path, groups: Sequence[str] = ()) -> None:
    """Install a pack into a new folder: site, checkout, and env.sh, which a shell reads.

    Raises:
        ValueError: as `check`; or `into` exists.
        RuntimeError: pip failed.
    """
    if into.exists():
        raise ValueError(f"{into} exists: give another folder, or remove it")
    found = check(folder, groups)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".gpu-pack-") as made:
        site, contents = Path(made) / "into" / "site", Path(made) / "contents"
        site.mkdir(parents=True)
        for parts in found.values():
            with tempfile.TemporaryFile(dir=made) as whole:
                for part in parts:
                    with part.open("rb") as file:
                        shutil.copyfileobj(file, whole)
                whole.seek(0)
                with tarfile.open(fileobj=whole) as archive:
                    archive.extractall(contents, filter="data")
        if wheels := sorted(map(str, contents.glob("wheels/*.whl"))):
            pip(
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--no-compile",
                "--target",
                str(site),
                *wheels,
            )
        if (contents / "sources").exists():
            shutil.copytree(contents / "sources", site, dirs_exist_ok=True)
        if (contents / "checkout.tar").exists():
            with tarfile.open(contents / "checkout.tar") as archive:
                archive.extractall(site.parent / "checkout", filter="data")
        (site.parent / "env.sh").write_text(environment(into.absolute()))
        os.rename(site.parent, into)


def environment(into: Path) -> str:
    """Lines for a shell: the packages, and the libraries that TransformerEngine loads, which are torch's."""
    libraries = ":".join(map(str, library_folders()))
    lines = [f'export PYTHONPATH="{into}/site${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += (
        [f'export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'] if libraries else []
    )
    return "\n".join(lines) + "\n"


def torch_folder() -> Path | None:
    """Where the torch of this interpreter is, without importing it."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def cuda_of_torch() -> str | None:
    """The CUDA version that torch was built for, such as 13.0; None without torch or without CUDA."""
    torch = torch_folder()
    if torch is None or not (torch / "version.py").is_file():
        return None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def library_folders() -> Iterator[Path]:
    """Folders with shared libraries beside the torch of this interpreter."""
    torch = torch_folder()
    if torch is not None:
        yield from sorted(torch.parent.glob("nvidia/*/lib"))
        yield torch / "lib"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = options.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="gather and divide")
    made.add_argument("pack", type=Path)
    made.add_argument(
        "--part-size", type=size, default=PART, help=f"bytes of a part at most; default: {PART // MIB}M"
    )
    made.add_argument("--te-wheel", type=Path, help="a wheel of transformer_engine_torch")
    made.add_argument(
        "--cuda",
        choices=CUDA,
        default=CUDA[0],
        help="of the target's torch, for TransformerEngine; default: 13",
    )
    made.add_argument("--have", type=Path, help="what `pip freeze` prints on the target machine")
    taken = commands.add_parser("unpack", help="check and install, without network")
    taken.add_argument("pack", type=Path)
    taken.add_argument("--into", type=Path, required=True, help="a folder that does not exist yet")
    taken.add_argument("--groups", nargs="+", default=[], help="default: all")
    return options.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        if args.command == "unpack":
            unpack(args.pack, args.into, args.groups)
            print(f". {args.into}/env.sh && cd {args.into}/checkout && make gpu")
            return 0
        for path in (args.te_wheel, args.have):
            if path is not None and not path.is_file():
                raise ValueError(f"{path} is no file")
        if args.pack.exists() and any(args.pack.iterdir()):
            raise ValueError(f"{args.pack} is not empty: give another folder, or remove it")
        have = names_of(args.have.read_text()) if args.have else []
        with tempfile.TemporaryDirectory() as folder:
            groups = gather(Path(folder), args.te_wheel, have, args.cuda)
            manifest = write_pack(groups, args.pack, args.part_size, args.cuda)
    except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"gpu_pack.py: {error}", file=sys.stderr)
        return 2
    for name, parts in manifest["groups"].items():
        print(f"{name}: {len(parts)} parts, {sum(part['bytes'] for part in parts) / MIB:.0f} MiB")
    if args.te_wheel is None:
        print("without TransformerEngine: --te-wheel names a wheel of transformer_engine_torch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
