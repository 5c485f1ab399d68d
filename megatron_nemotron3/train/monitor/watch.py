"""`nemotron3 watch`: plot the monitored series of a run as one PNG and print its warnings."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import run_of
from megatron_nemotron3.common import plots
from megatron_nemotron3.common.files import require_plot
from megatron_nemotron3.common.options import add_command, argument, json_flag, option
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.models.series import AGGREGATES, KINDS, display_name, is_decoder, layer_ticks
from megatron_nemotron3.train.monitor import events
from megatron_nemotron3.train.monitor.alarms import scan
from megatron_nemotron3.train.monitor.events import History

#: Tags that Megatron writes.
_LOSS = re.compile(r"(lm|mtp_\d+) loss")
#: Rules that need series which earlier versions did not write.
_NEED_AGGREGATES = ("router_collapse", "dead_experts", "mtp_loss_jump")
COLUMNS = 3
#: Up to this many rows are drawn as lines, more as a heat map.
LINES = 12
#: Most labels of layers on an axis.
LABELS = 18


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `nemotron3 watch`."""

    folder: Path = argument("the folder of --tensorboard-dir, a run, or its checkpoints", "DIR")
    output: Path | None = option("where to write (default: DIR/monitor.png)", "PNG")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 watch`."""
    add_command(commands.add_parser("watch"), WatchOptions, watch_command)


def watch_command(options: WatchOptions) -> int:
    """Plot the run in `folder` to `output` (default: monitor.png in it); print findings. Exit status 0."""
    folder = run_of(options.folder)
    output = options.output or folder / "monitor.png"
    if options.output is not None or folder.is_dir():  # a missing folder has its own message
        require_plot(output, "--output")
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
            not_applied=[],
        )
        for finding in scan(history):
            say(f"WARNING: {finding}", warnings=[asdict(finding)])
        if f"{AGGREGATES}/experts" not in history:
            say(
                f"not applied: {', '.join(_NEED_AGGREGATES)} (event files of an earlier version)",
                not_applied=list(_NEED_AGGREGATES),
            )
    return 0


def plot(history: History, panels: dict[str, History], path: Path, title: str) -> None:
    """Plot the losses, then one panel per kind (kind -> row -> points). The file is written atomically."""
    rows = -(-(1 + len(panels)) // COLUMNS)
    width, height = plots.PANEL
    size = (width * COLUMNS, height * rows)
    with plots.picture(path, rows, COLUMNS, size=size, title=title) as (_, grid):
        cells = iter(grid.flat)
        draw_losses(next(cells), history)
        for kind, series in panels.items():
            draw_panel(next(cells), kind, series)
        for unused in cells:
            unused.set_axis_off()


def panels_of(history: History) -> dict[str, History]:
    """The monitored series by kind; empty if there are none."""
    return {kind: rows for kind in KINDS if (rows := _panel_rows(history, kind))}


def _panel_rows(history: History, kind: str) -> History:
    prefix = f"{kind}/"
    return {tag.removeprefix(prefix): history[tag] for tag in sorted(history) if tag.startswith(prefix)}


def draw_losses(axes: Any, history: History) -> None:
    """Draw the losses that Megatron writes."""
    for tag in sorted(filter(_LOSS.fullmatch, history)):
        name = tag.removesuffix(" loss")
        label = "next token" if name == "lm" else display_name(name)
        axes.plot(*zip(*history[tag]), label=label)
    axes.set(title="Training loss", ylabel="nats per token")
    plots.step_axis(axes)
    if axes.lines:
        axes.legend()


def draw_panel(axes: Any, kind: str, series: History) -> None:
    """Draw the series of one kind: a line a layer, or a heat map of many layers."""
    about = KINDS[kind]
    axes.set_title(about.title)
    if len(series) <= LINES:
        for row, points in series.items():
            axes.plot(*zip(*points), lw=1, label=display_name(row))
        if about.log_scale:
            axes.set_yscale("log")
        axes.set_ylabel(about.unit)
        axes.legend(ncols=2, fontsize=6.5)
    else:
        _draw_heat_map(axes, series, about.unit, about.log_scale)
    plots.step_axis(axes)


def _draw_heat_map(axes: Any, series: History, unit: str, log_scale: bool) -> None:
    """Draw layers down and steps across; MTP's rows below a line."""
    from matplotlib.colors import LogNorm, Normalize

    rows = list(series)
    steps = sorted({step for points in series.values() for step, _ in points})
    column = {step: i for i, step in enumerate(steps)}
    table = [[float("nan")] * len(steps) for _ in rows]
    for line, points in zip(table, series.values()):
        for step, value in points:
            line[column[step]] = value
    values = [v for line in table for v in line if v == v]
    low, high = min(values), max(values)
    high = high if high > low else low + 1
    # A measurement holds from half way to the one before it to half way to the next.
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:])]
    first = middles[0] - steps[0] if middles else 0.5
    last = steps[-1] - middles[-1] if middles else 0.5
    edges = [steps[0] - first, *middles, steps[-1] + last]
    axes.set_facecolor("0.85")
    axes.grid(False)
    image = axes.pcolormesh(
        edges,
        [i - 0.5 for i in range(len(rows) + 1)],
        table,
        norm=LogNorm(low, high) if log_scale and low > 0 else Normalize(low, high),
        rasterized=True,
    )
    plots.color_bar(image, axes, unit)
    axes.set_yticks(*zip(*layer_ticks(rows, LABELS)))
    axes.set_ylabel("layer")
    if (decoder := sum(map(is_decoder, rows))) < len(rows):
        axes.axhline(decoder - 0.5, color="white", lw=1)
    axes.invert_yaxis()
