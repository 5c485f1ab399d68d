"""`nemotron3 report monitors`: plot the monitored series of a run as one PNG and print its warnings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import run_of
from megatron_nemotron3.common import plots
from megatron_nemotron3.common.files import require_plot
from megatron_nemotron3.common.options import add_command, argument, json_flag, option
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.models.series import KINDS, display_name
from megatron_nemotron3.train import log
from megatron_nemotron3.train.log import History
from megatron_nemotron3.train.monitor import events
from megatron_nemotron3.train.monitor.alarms import scan

COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `nemotron3 report monitors`."""

    folder: Path = argument("run, its checkpoints, or the folder of --tensorboard-dir", "DIR")
    output: Path | None = option("output file (default: DIR/monitor.png)", "PNG")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 report monitors`."""
    add_command(commands.add_parser("report monitors"), WatchOptions, watch_command)


def watch_command(options: WatchOptions) -> int:
    """Plot the run in `folder` to `output` (default: monitor.png in it); print findings. Exit status 0."""
    folder = run_of(options.folder)
    output = options.output or folder / "monitor.png"
    if options.output is not None or folder.is_dir():  # a missing folder has its own message
        require_plot(output, "--output", b"PNG")
    files = events.find(folder)
    history = events.read(files)
    panels = panels_of(history)
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
        )
        for finding in scan(history):
            say(f"WARNING: {finding}", warnings=[asdict(finding)])
    return 0


def plot(history: History, panels: dict[str, History], path: Path, title: str) -> None:
    """Plot the losses, then one panel per kind (kind -> row -> points). The file is written atomically."""
    rows = -(-(1 + len(panels)) // COLUMNS)
    width, height = plots.PANEL
    size = (width * COLUMNS, height * rows)
    with plots.picture(path, rows, COLUMNS, size=size, title=title) as (_, grid):
        cells = iter(grid.flat)
        axes = next(cells)
        axes.set_title("Training loss")
        log.draw_losses(axes, history)
        for kind, series in panels.items():
            draw_panel(next(cells), kind, series)
        for unused in cells:
            unused.set_axis_off()


def panels_of(history: History) -> dict[str, History]:
    """The monitored series by kind; empty if there are none."""
    found: dict[str, History] = {kind: {} for kind in KINDS}
    for tag in sorted(history):
        kind, _, row = tag.partition("/")
        if row and kind in found:
            found[kind][row] = history[tag]
    return {kind: rows for kind, rows in found.items() if rows}


def draw_panel(axes: Any, kind: str, series: History) -> None:
    """Draw the series of one kind, a line a layer."""
    about = KINDS[kind]
    axes.set_title(about.title)
    named = {display_name(row): points for row, points in series.items()}
    log.draw(axes, named, about.unit, log_scale=about.log_scale)
