"""The short suite on every supported megatron-core: `make test-matrix`; on main alone: `make test-main`.

An environment is made once per version (5 GB: torch comes with CUDA) and reused. Variables save that:
MATRIX_PYTHON_0_19 (or _MAIN) names an interpreter that already has that megatron-core and the tests'
packages, and MEGATRON_LM_DIR_0_19 a Megatron-LM checkout of that version, whose stock script then runs, too.
MEGATRON_LM_DIR_MAIN names a checkout of main. Its megatron is imported in front of the installed wheel, from
which come the packages and the compiled helper of the data sets, so nothing needs to be installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.options.reuse_existing_virtualenvs = True

#: Minor version -> what pip installs. docs/environment.md says what was seen.
RELEASES = {
    "0.19": "megatron-core[training]==0.19.2",
    "main": "megatron-core[training] @ git+https://github.com/NVIDIA/Megatron-LM.git@main",
}
PACKAGES = (
    "torch==2.11.0",
    "einops",
    "hypothesis",
    "matplotlib",
    "pytest",
    "pytest-xdist",
    "safetensors",
    "tensorboard",
    "tokenizers",
)

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


def _session(version: str) -> None:
    suffix = version.replace(".", "_").upper()
    checkout = os.environ.get(f"MEGATRON_LM_DIR_{suffix}")
    before_wheel = version == "main" and checkout is not None
    python = os.environ.get(f"MATRIX_PYTHON_{suffix}") or (sys.executable if before_wheel else None)

    # python=None: the interpreter that runs nox, a 3.12 of which nothing else need be on PATH.
    @nox.session(name=version, python=None, venv_backend="none" if python else None)
    def run(session: nox.Session) -> None:
        if not python:
            session.install(*PACKAGES, RELEASES[version])
            session.install("--no-deps", "-e", ".")
        front = [_in_front(checkout)] if checkout and before_wheel else []
        session.run(
            python or "python",
            *("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"),
            *SHORT,
            *session.posargs,
            external=bool(python),
            env={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([*front, str(ROOT)]),
                "MEGATRON_LM_DIR": str(Path(checkout).resolve()) if checkout else "/nowhere",
            },
        )


for _version in RELEASES:
    _session(_version)
