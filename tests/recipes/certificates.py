"""Write the recipes' certificates: `python -m tests.recipes.certificates [CASE…]`.

Each case of a recipe (`cases.py`) has a certificate beside the script, made by `nemotron3 certify` for the
command in the golden file: one line of JSON. Without names those are made anew that are missing or of
another command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_nemotron3 import models
from megatron_nemotron3.cli import main as main_command
from megatron_nemotron3.precision import yaml_file
from tests.recipes.cases import CASES, GOLDEN, RECIPES, ROOT, Case

_PRECISION = "--te-precision-config-file"


def place(case: Case) -> Path:
    """Return where the certificate of a case lies."""
    variant = f"-{case.variant}" if case.variant else ""
    return RECIPES / case.model / f"{case.recipe}{variant}.certificate.json"


def words(case: Case) -> list[str]:
    """Return the command of a case."""
    return shlex.split((GOLDEN / f"{case.name}.txt").read_text())


def options(case: Case) -> list[str]:
    """Return the words behind `nemotron3 certify` that name the launch."""
    gpu = case.variables.get("GPU")
    return ["--gpus", str(case.world_size), *(["--gpu", gpu] if gpu else [])]


@contextlib.contextmanager
def started(case: Case) -> Iterator[Path]:
    """Be in a folder that holds what the recipe writes before it starts the command."""
    command = words(case)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if _PRECISION in command:
            file = Path(command[command.index(_PRECISION) + 1])
            file.parent.mkdir(parents=True)
            yaml_file.write_precision_file(models.get(case.model), str(file))
        yield Path(folder)


def check(case: Case) -> dict[str, Any]:
    """Return what `nemotron3 certify --check` says of the certificate of a case."""
    output = io.StringIO()
    with started(case), contextlib.redirect_stdout(output):
        main_command(["certify", "--check", str(place(case)), "--json", *options(case), "--", *words(case)])
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def write(case: Case) -> bool:
    """Certify a case, and keep what it says of the launch. Return whether nothing failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron_nemotron3", "certify", *options(case), "--output", "made"]
    with started(case) as folder:
        done = subprocess.run([*command, "--", *words(case)], env=environment, timeout=1800)
        if done.returncode not in (0, 1):
            return False
        data = json.loads((folder / "made" / "certificate.json").read_text())
    del data["host"], data["seconds"]  # of the machine that certified it
    data["title"] = " ".join(("recipe", case.model, case.recipe, *filter(None, (case.variant,))))
    place(case).write_text(json.dumps(data, separators=(",", ":")).replace(f"{ROOT}/", "") + "\n")
    return bool(data["passed"])


def is_current(case: Case) -> bool:
    """Whether a case has a certificate that belongs to its command."""
    return place(case).exists() and bool(check(case)["belongs"])


def main(names: list[str]) -> int:
    """Certify the cases of these names, or those without a certificate. Return 1 if anything failed."""
    chosen = [case for case in CASES if (case.name in names if names else not is_current(case))]
    failures = []
    for case in chosen:
        print(f"-- {case.name}", flush=True)
        if not write(case):
            failures.append(case.name)
    print(f"failed: {', '.join(failures)}" if failures else "nothing failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
