"""`nemotron3 doctor`: checks versions, imports, GPU and one step."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

from megatron_nemotron3.cli.doctor import gpu, loading, packages
from megatron_nemotron3.cli.doctor.finding import DoctorFinding, render
from megatron_nemotron3.common.options import add_command, json_flag, option
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.models.own import model as named_model
from megatron_nemotron3.precision import settings


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
    if imported := ", ".join(name for name in packages.PURPOSE if name in have):
        _say(f"importing {imported}, which takes up to a minute")
    imports = loading.load_all()
    sections.append(("imports", imports))
    if "torch" in have:
        _say("asking torch for GPUs")
        sections.append(("gpu", gpu.findings()))
    else:
        sections.append(("gpu", [DoctorFinding("gpu", "absent", "not looked for: torch is not installed")]))
    sections.append(("precision", emulation()))
    if options.step is not None:
        _say("running the check of step")
        usable = {finding.subject for finding in imports if finding.level == "ok"}
        skipped = [DoctorFinding("step", "error", "skipped: torch or megatron-core cannot be imported")]
        needed = usable.issuperset(packages.NEEDED)
        sections.append(("step", _step_findings(options.step) if needed else skipped))
    verdict = _verdict(sections)
    sections.append(("verdict", [verdict]))
    if options.json:
        print_json({title: [asdict(finding) for finding in findings] for title, findings in sections})
    else:
        print(render(sections))
    return int(verdict.level == "error")


def emulation() -> list[DoctorFinding]:
    """The finding about NEMOTRON3_EMULATE; none where it is not set."""
    try:
        emulated = settings.emulation_in_environment()
    except ValueError as problem:
        return [DoctorFinding(EMULATE, "error", str(problem), f"unset {EMULATE}")]
    if emulated is None:
        return []
    return [DoctorFinding(EMULATE, "ok", f"the torch backend emulates {emulated.text()}")]


def _say(what: str) -> None:
    """Report on stderr what takes time; stdout holds the findings alone."""
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
    """Train a step, without Megatron's messages on stdout."""
    quiet_on_cpu()
    with redirect_stdout(io.StringIO()):
        from megatron_nemotron3.cli.doctor import step

        return step.findings(model)
