"""`nemotron3 doctor`: runs the checks, prints, and says 0 or 1."""

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
    command = commands.add_parser("doctor", help="is this environment fit to train")
    command.add_argument("--kernels", action="store_true", help="compare fast forms with their references")
    command.add_argument("--step", nargs="?", const="super", metavar="NAME", help="a step of its tiny form")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(run=doctor_command)


def doctor_command(options: argparse.Namespace) -> int:
    """Carry out `nemotron3 doctor`; raises as `doctor`."""
    return doctor(kernels=options.kernels, step=options.step, as_json=options.json)


def doctor(*, kernels: bool, step: str | None, as_json: bool) -> int:
    """Check this environment.

    Args:
        kernels: compare fast forms with their references, too.
        step: the model whose tiny form takes one step; None: no step.

    Returns: 0, or 1 if something will not work.

    Raises:
        ValueError: `step` names no model.
    """
    if step is not None:
        get(step)  # a wrong name before anything is tried
    sections: list[tuple[str, Sequence[Finding]]] = [
        ("packages", packages.check(packages.installed())),
        ("imports", loading.load_all()),
        ("gpu", gpu.findings()),
    ]
    usable = not failed([f for f in sections[1][1] if f.subject in ("torch", "megatron-core")])
    if kernels:
        sections.append(("kernels", _kernels() if usable else [_skipped("kernels")]))
    if step is not None:
        sections.append(("step", _step(step) if usable else [_skipped("step")]))
    print(json.dumps(as_data(sections), indent=2) if as_json else render(sections))
    return int(any(failed(findings) for _, findings in sections))


def _kernels() -> list[Finding]:
    from megatron_nemotron3.doctor import kernels

    with _quiet():
        return kernels.findings()


def _step(name: str) -> list[Finding]:
    from megatron_nemotron3.doctor import step

    with _quiet():
        return step.findings(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron prints to stdout, which is ours."""
    quiet_on_cpu()
    with redirect_stdout(io.StringIO()):
        yield


def _skipped(what: str) -> Finding:
    return Finding(what, "error", "not tried: torch or megatron-core cannot be imported")
