"""The wheel and the source distribution, and what they do in an environment that has nothing else.

Environments are made without a network: the wheel has no dependencies. An interpreter is looked for on PATH
and in ~/.pyenv/versions.
"""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path

import pytest

from megatron_nemotron3.cli.table import COMMANDS

#: For releases; tests/test_house.py tells in `make test` what must import without a library.
pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_nemotron3"
CODE = ("megatron_nemotron3", "recipes", "docs", "examples", "benchmarks", "tests", ".ci")
SOURCES = (*CODE, "pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "mkdocs.yml", "noxfile.py")
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")

#: Command -> words that need no other package, and a part of what they print.
BARE: dict[str, list[tuple[str, str]]] = {
    "show": [("super --json", '"hidden_size"')],
    "flags": [("super --tp 2 --ep 64 --dp 32", "--hybrid-layer-pattern"), ("nano --tiny --shell", "--spec")],
    "explain": [("ultra", "published launch")],
    "prune search": [("super --budget params=75B --vary moe_ffn_hidden_size=1280,2688", "prune … --sizes")],
    "precision": [("super", "nvfp4"), ("super --output nvfp4.yaml", "nvfp4.yaml")],
    "plan": [("super --gpus 128 --gpu h100", "TP")],
    "plan boundary": [("--from tp=2,dp=2 --to tp=1,dp=4 --samples 4", "rows")],
    "recipe": [("", "super pretrain"), ("nano proxy", "MODEL=nano"), ("--output recipes", "pretrain.sh")],
    "doctor": [("", "torch")],
}  # fmt: skip
#: Command -> words with which it ends at what is missing, and a part of the one line that it says.
REFUSED: dict[str, list[tuple[str, str]]] = {
    "run": [("missing.py", "missing.py does not exist: give that of a Megatron-LM checkout, or ")],
    "train": [("super --tiny --steps 1", "package torch is not installed: ")],
    "report monitors": [("missing", "missing is not a folder")],
    "plan": [("super --gpus 0 --gpu h100", "0")],
    "check": [("missing", "does not exist")],
    "chat": [("missing", "package torch is not installed: ")],
    "report": [("missing", "does not exist")],
    "finetune": [("missing", "arguments are required: --conversations")],
    "convert to-hf": [("missing b", "package torch is not installed: ")],
    "convert from-hf": [("missing b", "package torch is not installed: ")],
    "convert verify": [("missing b", "package torch is not installed: ")],
    "generate": [("missing", "package torch is not installed: ")],
    "certify": [("super --tiny", "package torch is not installed: ")],
    "train boost": [("missing --output out", "package torch is not installed: ")],
    "prune": [("missing --text a --scores s", "--text a does not exist")],
    "distill logits": [("missing --output out --samples 1", "missing")],
    "plan refit": [("super --from tp=2 --to tp=2", "package numpy is not installed: pip install")],
    "bisect": [
        ("missing --trainer a --engine b", "package torch is not installed: ")
    ],
    "distill projection": [("missing missing", "missing does not exist: give a folder with tokenizer.json")],
    "evaluate": [("missing --text missing", "package torch is not installed: ")],
}  # fmt: skip


def _setuptools(hook: str, source: Path, output: Path) -> Path:
    """Build with this environment's setuptools; returns the file."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(output)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution of a copy of this checkout, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    copy, output = folder / "copy", folder / "dist"
    output.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*SOURCES, *TEXTS):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy / name)
    sdist = _setuptools("build_sdist", copy, output)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, _setuptools("build_wheel", unpacked, output)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    places = {PACKAGE: "megatron_nemotron3", ROOT / "recipes": "megatron_nemotron3/recipes"}
    wanted = {
        f"{place}/{path.relative_to(folder)}"
        for folder, place in places.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == wanted
    assert {"megatron_nemotron3/py.typed", "megatron_nemotron3/recipes/super/pretrain.sh"} < names
    assert len(licences) == 1


def test_the_source_distribution_has_what_the_readme_names(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    # Targets of make, examples, recipes and links run and lead somewhere in an unpacked archive.
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    kept = {name for name in listed.stdout.splitlines() if name.partition("/")[0] in (*SOURCES, *TEXTS)}
    assert {*SOURCES, *TEXTS} - {*CODE} <= names and kept <= names
    text = _metadata(built[1]).get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    # A link became the name of a file.
    files = re.findall(r"\(`([\w./]+\.md)`\)", text)
    assert files and set(files) <= names


def _environment(folder: Path, python: str, wheel: Path) -> Path:
    """Make an environment that has the wheel and nothing else; returns its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    found = folder / "bin" / "python"
    words = ["--python", str(found), "--isolated", "install", "-q", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=_plain())
    return found


def _plain() -> dict[str, str]:
    """Neither pip's settings nor a checkout on the path count."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}


@pytest.mark.parametrize("place", ["wheel", "editable", "checkout"])
def test_recipes_wherever_the_package_is(built: tuple[Path, Path], place: str, tmp_path: Path) -> None:
    """Listed, printed, copied, and a copy launches: from a wheel, an editable install and a checkout."""
    checkout = built[0].parent.parent / "copy"
    python, variables = Path(sys.executable), {**_plain(), "PYTHONPATH": str(checkout)}
    scripts = checkout / "recipes"
    if place != "checkout":
        editable = place == "editable"
        wheel = _setuptools("build_editable", checkout, tmp_path) if editable else built[1]
        python, variables = _environment(tmp_path / "environment", sys.executable, wheel), _plain()
        if not editable:
            (site,) = (tmp_path / "environment").glob("lib/*/site-packages")
            scripts = site / "megatron_nemotron3" / "recipes"

    def recipe(*words: str) -> str:
        command = [python, "-m", "megatron_nemotron3", "recipe", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = json.loads(recipe("--json"))
    started = {path for path in scripts.glob("*/*.sh") if path.read_text().startswith("#!")}
    assert {Path(one["path"]) for one in listed} == started and len(started) > 20
    assert recipe("super", "pretrain") == (ROOT / "recipes/super/pretrain.sh").read_text()
    recipe("--output", "my recipes")
    path = os.pathsep.join((str(python.parent), variables["PATH"]))
    for folder in (scripts, tmp_path / "my recipes"):
        done = subprocess.run(
            ["bash", folder / "super/debug_cpu.sh"], cwd=tmp_path,
            env={**variables, "PATH": path, "DRY_RUN": "1"}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0 and "--mock-data" in done.stdout, done.stderr


def test_metadata(built: tuple[Path, Path]) -> None:
    found = _metadata(built[1])
    assert found["License-Expression"] == "Apache-2.0" and found["License-File"] == "LICENSE"
    assert found["Requires-Python"] == ">=3.10" and found["Description-Content-Type"] == "text/markdown"
    classifiers = found.get_all("Classifier") or []
    assert [c.rpartition(" ")[2] for c in classifiers if "Python :: 3." in c] == list(VERSIONS)
    assert "Typing :: Typed" in classifiers
    assert all("https://" in url for url in found.get_all("Project-URL") or [])
    # Whatever needs a package is an extra.
    assert [need for need in found.get_all("Requires-Dist") or [] if "extra ==" not in need] == []
    import megatron_nemotron3

    assert found["Version"] == megatron_nemotron3.__version__


def test_twine(built: tuple[Path, Path]) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed: pip install twine")
    words = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, built)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def _interpreter(version: str) -> str:
    if version == HERE:
        return sys.executable
    places = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python"))
    found = shutil.which(f"python{version}") or next(map(str, places), None)
    # A shim of pyenv is there for versions that are not switched on.
    for candidate in (found, *map(str, places)):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    pytest.skip(f"no Python {version} on PATH or in ~/.pyenv/versions")


def test_every_command_is_tried() -> None:
    """With an empty environment, so that a new command must say what it needs."""
    assert {name for name, command in COMMANDS.items() if command.module} == {*BARE, *REFUSED}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bare_environment(built: tuple[Path, Path], version: str, tmp_path: Path) -> None:
    """Every command that needs no other package works, every other one names the package."""
    environment, folder = tmp_path / "environment", tmp_path / "folder"
    folder.mkdir()
    python = _environment(environment, _interpreter(version), built[1])

    # Every file can be compiled, not only those that are imported.
    installed = next(environment.glob("lib/*/site-packages/megatron_nemotron3"))
    subprocess.run([python, "-W", "error", "-m", "compileall", "-q", installed], check=True, env=_plain())

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONWARNINGS": "error"}
        program = environment / "bin" / "nemotron3"
        return subprocess.run(
            [program, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=120
        )

    calls = [
        (command, words, text)
        for table in (BARE, REFUSED)
        for command, rows in table.items()
        for words, text in rows
    ]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda call: run([*call[0].split(), *call[1].split()]), calls))
    for (command, words, text), done in zip(calls, results):
        said = f"{command} {words}: {done.returncode}\n{done.stdout[-500:]}\n{done.stderr}"
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, said
        if (words, text) in BARE.get(command, []):
            # The doctor's answer is that this environment cannot train.
            assert done.returncode == (command == "doctor") and text in done.stdout, said
        else:
            assert done.returncode == 2 and text in done.stderr.splitlines()[-1], said
            assert "package" not in text or "pip install" in done.stderr, said
            if "package torch" in text:  # for an older Python pip has no megatron-core
                older = f"megatron-core needs Python 3.12, and this is {version}:"
                assert version in ("3.10", "3.11") or older not in done.stderr, said
    assert (folder / "nvfp4.yaml").is_file()

    # The copied recipe, with the interpreter that has the package.
    variables = {"PATH": f"{environment}/bin:/usr/bin:/bin", "DRY_RUN": "1"}
    done = subprocess.run(
        ["bash", "recipes/super/debug_cpu.sh"], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--mock-data" in done.stdout, done.stderr
    assert str(installed) in done.stdout  # of the wheel, not of this checkout
