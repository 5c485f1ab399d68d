"""`nemotron3 doctor`: runs the checks, prints the findings and returns the exit code."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.cli.doctor import gpu, loading, packages, recipe
from megatron_nemotron3.cli.doctor.finding import DoctorFinding, as_data, failed, render
from megatron_nemotron3.common.options import add_command, json_flag, option
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.models.own import model as named_model


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `nemotron3 doctor`."""

    step: str | None = option(
        "also train the tiny form of a model, a NAME or FILE, for one step", "NAME", nargs="?", const="super"
    )
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 doctor`."""
    add_command(commands.add_parser("doctor"), DoctorOptions, doctor_command)


def doctor_command(options: DoctorOptions) -> int:
    """Check this environment. Exit status 1 if there is an error, else 0."""
    if options.step is not None:
        named_model(options.step)  # reports a wrong name before the checks start
    have = packages.installed()
    sections: list[tuple[str, Sequence[DoctorFinding]]] = [
        ("packages", [*packages.check(have), *packages.compiled()])
    ]
    told = ", ".join(name for name in packages.PURPOSE if name in have)
    if told:
        _say(f"importing {told}, which takes up to a minute")
    sections.append(("imports", loading.load_all()))
    loaded = {f.subject: f.level == "ok" for f in sections[1][1]}
    if "torch" in have:
        _say("asking torch for GPUs")
        sections.append(("gpu", gpu.findings()))
    else:
        sections.append(("gpu", [DoctorFinding("gpu", "absent", "not looked for: torch is not installed")]))
    sections.append(("precision", recipe.findings()))
    usable = all(loaded.get(name) for name in packages.NEEDED)
    if options.step is not None:
        _say("running the check of step")
        skipped = [DoctorFinding("step", "error", "skipped: torch or megatron-core cannot be imported")]
        sections.append(("step", _step_findings(options.step) if usable else skipped))
    sections.append(("verdict", [_verdict(sections)]))
    if options.json:
        print_json(as_data(sections))
    else:
        print(render(sections))
    return int(any(failed(findings) for _, findings in sections))


def _say(what: str) -> None:
    """Tell a person who waits what takes the time; stdout holds the findings alone."""
    print(f"nemotron3 doctor: {what} …", file=sys.stderr, flush=True)


def _verdict(sections: Sequence[tuple[str, Sequence[DoctorFinding]]]) -> DoctorFinding:
    """Return whether this environment can train, and the next command."""
    errors = [finding for _, findings in sections for finding in findings if finding.level == "error"]
    if not errors:
        return DoctorFinding("verdict", "ok", "this environment can train", "nemotron3 train nano --tiny")
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in errors))
    cure = next((finding.cure for finding in errors if finding.cure), "")
    return DoctorFinding("verdict", "error", f"this environment cannot train: {subjects}", cure)


def _step_findings(model: str) -> list[DoctorFinding]:
    """Train a step, with Megatron's messages kept off stdout, which holds the findings."""
    quiet_on_cpu()
    with redirect_stdout(io.StringIO()):
        from megatron_nemotron3.cli.doctor import step

        return step.findings(model)
