"""Every example and recipe runs as it stands; links of the documentation lead to files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_python

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
#: Those that are started, not imported by another.
SCRIPTS = [
    p for p in sorted((ROOT / "examples").glob("*.py")) if "__main__" in p.read_text() or p in EXAMPLES
]


def _run(words: list[str], folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    full = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(words, cwd=folder, env=full, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "example",
    [pytest.param(p, id=p.stem, marks=pytest.mark.full if p.stem.startswith("04") else ()) for p in EXAMPLES],
)
def test_example(example: Path, tmp_path: Path) -> None:
    """From any folder, on a machine without a GPU."""
    if example.stem.startswith("04"):  # it starts the launcher, which needs a process of its own
        done = _run([sys.executable, str(example)], tmp_path, PYTHONPATH="", CUDA_VISIBLE_DEVICES="")
    else:
        done = run_python([str(example)], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout and "Traceback" not in done.stderr


@pytest.mark.full
def test_weights_move_between_processes() -> None:
    """The server computes what the trainer does, after each step."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/refit.py"]
    done = _run([sys.executable, *words], CUDA_VISIBLE_DEVICES="")
    found = re.findall(r"step (\d): 493 tensors, .* (\S+)\n", done.stdout)
    assert [step for step, _ in found] == ["0", "1", "2"], done.stderr[-2000:]
    assert max(float(difference) for _, difference in found) < 1e-4


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_finds_its_checkout(script: Path, tmp_path: Path) -> None:
    """Without an installation, from another folder: the lines that extend the path are run."""
    if "megatron_nemotron3" not in script.read_text():
        pytest.skip("it does not import the package")
    lines = [line for line in script.read_text().splitlines() if "sys.path" in line or "HERE =" in line]
    code = ["import os, sys", "from pathlib import Path", f"__file__ = {str(script)!r}", *lines]
    check = "import importlib.util as u; print(u.find_spec('megatron_nemotron3').origin)"
    words = [sys.executable, "-S", "-c", "\n".join([*code, check])]
    done = subprocess.run(words, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "megatron_nemotron3/__init__.py"), done.stderr


#: Scripts that import others beside them.
WITH_SIBLINGS = ["compress_minitron", "latent_moe_study", "nvfp4_ablation", "omni_learns", "paired_studies"]


@pytest.mark.parametrize("name", WITH_SIBLINGS)
def test_a_script_alone_names_what_is_missing(name: str, tmp_path: Path) -> None:
    """Before anything is imported that takes seconds, or is not installed."""
    copy = shutil.copy(ROOT / f"examples/{name}.py", tmp_path)
    done = subprocess.run([sys.executable, "-S", copy], env={}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert ".py is not beside it: copy the whole folder examples/" in done.stderr


def test_every_script_with_siblings_says_so() -> None:
    """Each of them is named in the line, and other scripts import none."""
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for script in SCRIPTS:
        text = script.read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.M)) & names
        assert bool(imported) == (script.stem in WITH_SIBLINGS), script.stem
        assert all(f'"{name}.py"' in text for name in imported), script.stem


def test_recipe_stops_at_a_layout_that_cannot_work() -> None:
    env = {"DRY_RUN": "1", "DATA_PATH": "/data/x", "TOKENIZER": "/tok", "GPUS": "6"}
    done = _run(["bash", str(ROOT / "recipes/super/pretrain.sh")], **env)
    assert done.returncode == 2
    assert "EP" in done.stderr and "torch.distributed.run" not in done.stdout


def test_documents_link_to_files_that_exist() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
