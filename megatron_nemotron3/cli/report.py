"""`nemotron3 report`: losses, monitors, precision, versions and checkpoints of a run in one HTML file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import run_of
from megatron_nemotron3.common.files import require_plot, write_text
from megatron_nemotron3.common.options import add_command, argument, json_flag, option
from megatron_nemotron3.common.output import result, say

NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `nemotron3 report`."""

    folder: Path = argument("run, or its checkpoints", "RUN")
    output: Path | None = option(f"output file (default: RUN/{NAME})", "HTML")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 report`."""
    add_command(commands.add_parser("report"), ReportOptions, report_command)


def report_command(options: ReportOptions) -> int:
    """Write the page; exit status 0."""
    from megatron_nemotron3.precision.report import summary
    from megatron_nemotron3.train.report import page

    folder = run_of(options.folder)
    output = options.output or folder / NAME
    facts = page.gather(folder)
    require_plot(output, "--output", b"<!doctype html>")
    text = page.render(
        facts=facts,
        written=time.strftime("%Y-%m-%d %H:%M"),
        training=list(page.training(facts)),
        monitors=list(page.monitors(facts)),
        precision="\n".join(summary(facts.precision)) if facts.precision else "",
    )
    write_text(output, text)
    with result(options.json):
        say(
            f"{facts.title}: {facts.state}",
            model=facts.title,
            state=facts.state,
            result=dict(facts.loss_rows()),
            warnings=facts.warnings,
            notes=facts.notes,
        )
        say(f"report           {output} ({len(text.encode()) / 1e6:.1f} MB)", report=output)
    return 0
