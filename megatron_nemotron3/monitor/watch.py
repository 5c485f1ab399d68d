"""`nemotron3 watch`: plot the monitored series of a run as one PNG and print its warnings."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.files import require_plot, save_figure
from megatron_nemotron3.checkpoint.folders import run_of
from megatron_nemotron3.checkpoint.output import add_json, result, say
from megatron_nemotron3.monitor import events
from megatron_nemotron3.monitor.alarms import scan
from megatron_nemotron3.monitor.events import History
from megatron_nemotron3.monitor.series import AGGREGATES, KINDS

#: Tags that Megatron writes.
_LOSS = re.compile(r"(lm|mtp_\d+) loss")
#: Rules that need series which earlier versions did not write.
_NEED_AGGREGATES = ("router_collapse", "dead_experts", "mtp_loss_jump")
COLUMNS = 3
#: Up to this many rows are drawn as lines, more as a heat map.
LINES = 12


def register(commands: Any) -> None:
    """Add `nemotron3 watch`."""
    command = commands.add_parser("watch")
    command.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder of --tensorboard-dir, a run, or its checkpoints"
    )
    command.add_argument("--output", type=Path, metavar="PNG", help="default: DIR/monitor.png")
    add_json(command)
    command.set_defaults(run=watch_command)


def watch_command(options: argparse.Namespace) -> int:
    """Plot the run in `folder` to `output` (default: monitor.png in it); print findings. Exit status 0.

    Raises:
        ValueError: there are no event files, one is corrupt, or they hold no monitored series.
        OSError: the PNG cannot be written.
        ModuleNotFoundError: tensorboard or matplotlib is not installed.
    """
    folder: Path = run_of(options.folder)
    output = options.output or folder / "monitor.png"
    if options.output is not None or folder.is_dir():  # a missing folder has its own message
        require_plot(output, "--output")
    files = events.find(folder)
    history = events.read(files)
    panels = {kind: rows for kind in KINDS if (rows := _panel_rows(history, kind))}
    if not panels:
        raise ValueError(
            f"{folder}: {len(files)} event file(s) hold no monitored series: train with monitors, which "
            "are off with NEMOTRON3_MONITOR=0, for models without experts, and with CUDA graphs"
        )
    plot(history, panels, output, str(folder))
    points = max(len(points) for rows in panels.values() for points in rows.values())
    with result(options.json):
        say(
            f"{len(panels)} series of up to {max(map(len, panels.values()))} layers, {points} points: "
            f"{output}",
            folder=folder,
            plot=output,
            series={kind: len(rows) for kind, rows in panels.items()},
            points=points,
            warnings=[],
            not_applied=[],
        )
        _say_findings(history)
    return 0


def _say_findings(history: History) -> None:
    for finding in scan(history):
        say(f"WARNING: {finding}", warnings=[asdict(finding)])
    if f"{AGGREGATES}/experts" not in history:
        say(
            f"not applied: {', '.join(_NEED_AGGREGATES)} (event files of an earlier version)",
            not_applied=list(_NEED_AGGREGATES),
        )


def plot(history: History, panels: dict[str, History], path: Path, title: str) -> None:
    """Plot the losses, then one panel per kind (kind -> row -> points). The file is written atomically."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-(1 + len(panels)) // COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(5 * COLUMNS, 3.2 * rows), dpi=110, squeeze=False, layout="constrained"
    )
    cells = iter(grid.flat)
    _draw_losses(next(cells), history)
    for kind, series in panels.items():
        _draw_panel(figure, next(cells), kind, series)
    for unused in cells:
        unused.set_axis_off()
    figure.suptitle(title)
    save_figure(figure, path)


def _panel_rows(history: History, kind: str) -> History:
    prefix = f"{kind}/"
    return {tag.removeprefix(prefix): history[tag] for tag in sorted(history) if tag.startswith(prefix)}


def _draw_losses(axes: Any, history: History) -> None:
    for tag in sorted(filter(_LOSS.fullmatch, history)):
        axes.plot(*zip(*history[tag]), lw=1, label=tag)
    axes.set_title("loss (nats per token)", fontsize=9)
    if axes.lines:
        axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _draw_panel(figure: Any, axes: Any, kind: str, series: History) -> None:
    from matplotlib.colors import LogNorm

    about = KINDS[kind]
    axes.set_title(f"{about.title} ({about.unit})", fontsize=9)
    if len(series) <= LINES:
        for row, points in series.items():
            axes.plot(*zip(*points), lw=1, marker="." if len(points) == 1 else None, label=row)
        if about.log_scale:
            axes.set_yscale("log")
        axes.legend(fontsize=6, ncols=2)
        axes.grid(alpha=0.3)
        return
    steps = sorted({step for points in series.values() for step, _ in points})
    column = {step: i for i, step in enumerate(steps)}
    table = [[float("nan")] * len(steps) for _ in series]
    for line, points in zip(table, series.values()):
        for step, value in points:
            line[column[step]] = value
    positive = about.log_scale and all(v > 0 for line in table for v in line if v == v)
    image = axes.pcolormesh(
        steps if len(steps) > 1 else [steps[0], steps[0] + 1],
        range(len(series)) if len(steps) > 1 else range(len(series) + 1),
        table,
        norm=LogNorm() if positive else None,
        shading="nearest" if len(steps) > 1 else "flat",
    )
    figure.colorbar(image, ax=axes)
    ticks = range(0, len(series), max(1, len(series) // 8))
    axes.set_yticks([t + (0.0 if len(steps) > 1 else 0.5) for t in ticks], [list(series)[t] for t in ticks])
    axes.tick_params(labelsize=6)
    axes.invert_yaxis()
