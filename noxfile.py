"""The short suite on every supported megatron-core: `make test-matrix`, or `nox -s main`.

An environment is made once per version (5 GB: torch comes with CUDA) and reused. Two variables save that:
MATRIX_PYTHON_0_19 (or _MAIN) names an interpreter that already has that megatron-core and the tests'
packages, and MEGATRON_LM_DIR_0_19 (or _MAIN) a Megatron-LM checkout of that version, whose stock script
then runs, too.
"""

from __future__ import annotations

import os

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
    "tests/test_cpu.py",
    "tests/test_layouts.py",
    "tests/test_specs.py",
    "tests/test_checkpoint_keys.py",
    "tests/test_mtp_aux_loss.py",
    "tests/layers/test_modules.py",
    "tests/args/test_megatron.py",
)


def _session(version: str) -> None:
    suffix = version.replace(".", "_").upper()
    python = os.environ.get(f"MATRIX_PYTHON_{suffix}")

    # python=None: the interpreter that runs nox, a 3.12 of which nothing else need be on PATH.
    @nox.session(name=version, python=None, venv_backend="none" if python else None)
    def run(session: nox.Session) -> None:
        if not python:
            session.install(*PACKAGES, RELEASES[version])
            session.install("--no-deps", "-e", ".")
        session.run(
            python or "python",
            *("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"),
            *SHORT,
            *session.posargs,
            external=bool(python),
            env={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)),
                "MEGATRON_LM_DIR": os.environ.get(f"MEGATRON_LM_DIR_{suffix}", "/nowhere"),
            },
        )


for _version in RELEASES:
    _session(_version)
