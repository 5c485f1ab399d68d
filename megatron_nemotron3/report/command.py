"""`nemotron3 report`: losses, monitors, precision, versions and checkpoints of a run in one HTML file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.folders import run_of
from megatron_nemotron3.common.files import require_plot, write_text
from megatron_nemotron3.common.output import add_json, result, say

NAME = "report.html"
#: Tokens of the sample.
NEW_TOKENS = 120


def register(commands: Any) -> None:
    """Add `nemotron3 report`."""
    command = commands.add_parser("report")
    command.add_argument("folder", type=Path, metavar="RUN", help="a run, or its checkpoints")
    command.add_argument("--output", type=Path, metavar="HTML", help=f"where to write (default: RUN/{NAME})")
    command.add_argument("--prompt", metavar="TEXT", help="text to continue (by the last checkpoint)")
    add_json(command)
    command.set_defaults(run=report_command)


def report_command(options: argparse.Namespace) -> int:
    """Write the page; exit status 0.

    Raises:
        ValueError: the folder is not a run's; or there is no checkpoint or tokenizer for --prompt.
        OSError: the page cannot be written.
        ModuleNotFoundError: matplotlib, jinja2 or tensorboard is not installed.
    """
    from megatron_nemotron3.precision.report import summary
    from megatron_nemotron3.report import figures, page
    from megatron_nemotron3.report.facts import gather

    folder: Path = run_of(options.folder)
    output = options.output or folder / NAME
    facts = gather(folder)
    require_plot(output, "--output")
    sample = None if options.prompt is None else _sample(folder, options.prompt)
    text = page.render(
        facts=facts,
        written=time.strftime("%Y-%m-%d %H:%M"),
        training=list(figures.training(facts)),
        monitors=list(figures.monitors(facts)),
        precision="\n".join(summary(facts.precision)) if facts.precision else "",
        quantization=figures.quantization(facts),
        prompt=options.prompt,
        sample=sample,
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


def _sample(folder: Path, prompt: str) -> str:
    from megatron_nemotron3.generate.sample import sample

    return sample(folder, prompt, NEW_TOKENS)
