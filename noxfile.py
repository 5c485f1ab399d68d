"""The short suite on every megatron-core of the range: `make test-matrix`, or `nox -s 0.18`.

An environment is made once a version (5 GB: torch comes with CUDA) and reused. Two variables spare that:
MATRIX_PYTHON_0_18 names an interpreter that has megatron-core 0.18 and the tests' packages already, and
MEGATRON_LM_DIR_0_18 a Megatron-LM checkout of that version, whose stock script is then run, too.
"""

from __future__ import annotations

import os

import nox

nox.options.reuse_existing_virtualenvs = True

#: Minor version -> the release tested. docs/environment.md says what was seen.
RELEASES = {"0.17": "0.17.1", "0.18": "0.18.2", "0.19": "0.19.2"}
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

#: The short suite: file -> the first version it runs on. The others import names that version lacks.
SHORT = {
    "tests/test_versions.py": "0.17",
    "tests/test_cpu.py": "0.17",
    "tests/test_layouts.py": "0.17",
    "tests/test_specs.py": "0.17",
    "tests/test_checkpoint_keys.py": "0.17",
    "tests/test_mtp_aux_loss.py": "0.18",
    "tests/layers/test_modules.py": "0.18",
    "tests/args/test_megatron.py": "0.18",
}
#: Tests that ask upstream for a name of another version.
DESELECTED = {
    # The first reads MTP's losses under a key of 0.19, the second expects no warning of rules_version.
    "0.18": (
        "tests/layers/test_modules.py::test_mtp_is_its_definition",
        "tests/args/test_megatron.py::test_vocabulary_that_tp_does_not_divide",
    ),
}


def _suite(version: str) -> list[str]:
    """Arguments of pytest."""
    newer = list(RELEASES)
    files = [file for file, first in SHORT.items() if newer.index(first) <= newer.index(version)]
    return [*files, *(f"--deselect={test}" for test in DESELECTED.get(version, ()))]


def _session(version: str) -> None:
    suffix = version.replace(".", "_")
    python = os.environ.get(f"MATRIX_PYTHON_{suffix}")

    # python=None: the interpreter that runs nox, a 3.12 of which nothing else need be on PATH.
    @nox.session(name=version, python=None, venv_backend="none" if python else None)
    def run(session: nox.Session) -> None:
        if not python:
            session.install(*PACKAGES, f"megatron-core[training]=={RELEASES[version]}")
            session.install("--no-deps", "-e", ".")
        session.run(
            python or "python",
            *("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"),
            *_suite(version),
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
