"""`nemotron3 doctor`: runs the checks, prints the findings and returns the exit code."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.doctor import gpu, loading, packages
from megatron_nemotron3.doctor.finding import Finding, as_data, failed, render
from megatron_nemotron3.models import get


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
        help="also train the tiny form of a model for one step",
    )
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=doctor_command)


def doctor_command(options: argparse.Namespace) -> int:
    """Run `nemotron3 doctor`; raises as `doctor`."""
    return doctor(kernels=options.kernels, step=options.step, as_json=options.json)


def doctor(*, kernels: bool, step: str | None, as_json: bool) -> int:
    """Check this environment.

    Args:
        kernels: also compare the fast kernels with their references.
        step: name of a model whose tiny form is trained for one step; None for no step.

    Returns:
        0, or 1 if there is an error.

    Raises:
        ValueError: `step` is not the name of a model.
    """
    if step is not None:
        get(step)  # reports a wrong name before the checks start
    sections: list[tuple[str, Sequence[Finding]]] = [
        ("packages", packages.check(packages.installed())),
        ("imports", loading.load_all()),
        ("gpu", gpu.findings()),
    ]
    usable = not failed([f for f in sections[1][1] if f.subject in ("torch", "megatron-core")])
    if kernels:
        sections.append(("kernels", _kernel_findings() if usable else [_skipped_finding("kernels")]))
    if step is not None:
        sections.append(("step", _step_findings(step) if usable else [_skipped_finding("step")]))
    print(json.dumps(as_data(sections), indent=2) if as_json else render(sections))
    return int(any(failed(findings) for _, findings in sections))


def _kernel_findings() -> list[Finding]:
    from megatron_nemotron3.doctor import kernels

    with _megatron_silenced():
        return kernels.findings()


def _step_findings(name: str) -> list[Finding]:
    from megatron_nemotron3.doctor import step

    with _megatron_silenced():
        return step.findings(name)


@contextmanager
def _megatron_silenced() -> Iterator[None]:
    """Keep Megatron's messages off stdout, which holds the findings."""
    quiet_on_cpu()
    with redirect_stdout(io.StringIO()):
        yield


def _skipped_finding(what: str) -> Finding:
    return Finding(what, "error", "skipped: torch or megatron-core cannot be imported")
