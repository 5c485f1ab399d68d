"""The short suite in every supported environment: `make test-matrix`; on main alone: `make test-main`.

pinned   this environment, which `make` created
floor    the lowest versions that pyproject.toml allows
newest   the highest, as pip installs them for a user
main     megatron-core's main, with the highest versions of the rest

Each trains the tiny model first, where packages are installed from the wheel. uv installs them, anew in each
run; such an environment has 6 GB, since torch comes with CUDA. MEGATRON_LM_DIR names a Megatron-LM checkout
of 0.19, whose stock script then runs, too, and MEGATRON_LM_DIR_MAIN one of main. Its megatron is imported in
front of the wheel that `make` installed, from which come the packages and the compiled helper of the data
sets, so nothing needs to be installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True

#: Session -> what `uv pip install` takes besides the package; None: nothing is installed.
ENVIRONMENTS: dict[str, tuple[str, ...] | None] = {
    "pinned": None,
    "floor": ("--resolution", "lowest-direct"),
    "newest": (),
    "main": ("megatron-core[training] @ git+https://github.com/NVIDIA/Megatron-LM.git@main",),
}
#: The short suite.
SHORT = (
    "tests/test_versions.py",
    "tests/cpu/test_cpu.py",
    "tests/test_layouts.py",
    "tests/test_specs.py",
    "tests/test_checkpoint_keys.py",
    "tests/test_mtp_aux_loss.py",
    "tests/layers/test_modules.py",
    "tests/launch/test_megatron.py",
    "tests/launch/test_performance.py",
)
#: Extras that are installed together -> tests. `omni` allows only newer packages than `train`.
EXTRAS = {
    "completion,convert,remote,train": (
        *SHORT,
        "tests/checkpoints/convert/test_remote.py",
        "tests/parallel/test_conversations.py",
    ),
    "omni,train": ("tests/train/omni/test_data.py", "tests/train/omni/test_build.py"),
}
TOOLS = ("hypothesis", "pytest", "pytest-xdist", "safetensors", "scikit-learn")
PYTEST = ("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")

ROOT = Path(__file__).resolve().parent


def _in_front(checkout: str) -> str:
    """Return a folder that has only the checkout's `megatron`: its tests and scripts are not importable.

    Raises:
        SystemExit: it is not a Megatron-LM checkout.
    """
    megatron = Path(checkout).resolve() / "megatron"
    if not (megatron / "core").is_dir():
        sys.exit(f"MEGATRON_LM_DIR={checkout} has no megatron/core: name a checkout of Megatron-LM")
    folder = ROOT / "build" / "main"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "megatron").unlink(missing_ok=True)
    (folder / "megatron").symlink_to(megatron)
    return str(folder)


def _session(name: str) -> None:
    checkout = os.environ.get("MEGATRON_LM_DIR_MAIN" if name == "main" else "MEGATRON_LM_DIR")
    front = [_in_front(checkout)] if checkout and name == "main" else []
    needed = None if front else ENVIRONMENTS[name]
    python = sys.executable if needed is None else "python"

    def train(session: nox.Session) -> None:
        """Two steps of the tiny model, outside of this checkout."""
        words = ("-m", "megatron_nemotron3", "train", "super", "--tiny", "--steps", "2", "--output", "run")
        with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
            session.run(python, *words, external=True, env={"PYTHONPATH": os.pathsep.join(front) or None})

    def test(session: nox.Session, files: tuple[str, ...]) -> None:
        variables = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*front, str(ROOT)]),
            "MEGATRON_LM_DIR": str(Path(checkout).resolve()) if checkout else "/nowhere",
        }
        session.run(python, *PYTEST, *files, *session.posargs, external=True, env=variables)

    # python=None: the interpreter that runs nox, a 3.12 of which nothing else need be on PATH.
    @nox.session(name=name, python=None, venv_backend="none" if needed is None else None)
    def run(session: nox.Session) -> None:
        if needed is None:
            train(session)
            test(session, SHORT)
            return
        # uv does not read pip's variable.
        session.env["UV_DEFAULT_INDEX"] = os.environ.get("UV_DEFAULT_INDEX", os.environ.get("PIP_INDEX_URL"))
        for extras, files in EXTRAS.items():
            session.install("--upgrade", *needed, f".[{extras}]")
            session.install(*TOOLS)
            train(session)
            test(session, files)


for _name in ENVIRONMENTS:
    _session(_name)
