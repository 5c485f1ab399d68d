"""`nemotron3 doctor`: runs the checks, prints the findings and returns the exit code."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.doctor import gpu, loading, packages, recipe
from megatron_nemotron3.doctor.finding import Finding, as_data, failed, render
from megatron_nemotron3.models.own import model as named_model


def register(commands: Any) -> None:
    """Add `nemotron3 doctor`."""
    command = commands.add_parser("doctor", help="check whether this environment can train")
    command.add_argument(
        "--kernels", action="store_true", help="also compare the fast kernels with their references"
    )
    command.add_argument(
        "--step",
        nargs="?",
        const="super",
        metavar="NAME",
        help="also train the tiny form of a model, a NAME or FILE, for one step",
    )
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=doctor_command)


def doctor_command(options: argparse.Namespace) -> int:
    """Check this environment. Exit status 1 if there is an error, else 0.

    Args:
        options: those of `register`.

    Raises:
        ValueError: --step names no model.
    """
    if options.step is not None:
        named_model(options.step)  # reports a wrong name before the checks start
    sections: list[tuple[str, Sequence[Finding]]] = [
        ("packages", packages.check(packages.installed())),
        ("imports", loading.load_all()),
        ("gpu", gpu.findings()),
        ("precision", recipe.findings()),
    ]
    usable = not failed([f for f in sections[1][1] if f.subject in ("torch", "megatron-core")])
    for title, wanted in (("kernels", options.kernels), ("step", options.step is not None)):
        skipped = [Finding(title, "error", "skipped: torch or megatron-core cannot be imported")]
        if wanted:
            sections.append((title, _computed_findings(title, options.step) if usable else skipped))
    print(json.dumps(as_data(sections), indent=2) if options.json else render(sections))
    return int(any(failed(findings) for _, findings in sections))


def _computed_findings(title: str, model: str) -> list[Finding]:
    """Run a check that needs torch, with Megatron's messages kept off stdout, which holds the findings."""
    quiet_on_cpu()
    with redirect_stdout(io.StringIO()):
        if title == "kernels":
            from megatron_nemotron3.doctor import kernels

            return kernels.findings()
        from megatron_nemotron3.doctor import step

        return step.findings(model)
