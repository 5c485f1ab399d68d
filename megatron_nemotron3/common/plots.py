"""The style of all plots, and their files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import atomic

#: Dots per inch of a PNG.
DPI = 110
#: Side of a panel among others, in inches.
PANEL = (5.0, 3.2)
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.framealpha": 0.85,
    "figure.titlesize": 12,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.3,
    # Text of an SVG stays text.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
}


@contextlib.contextmanager
def picture(
    path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], title: str = ""
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes [rows, columns]; when the block ends, write the PNG atomically."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False)
        if title:
            figure.suptitle(title)
        with atomic(path) as temporary:
            figure.savefig(temporary, format="png")


def svg(draw: Callable[[Any, Any], None]) -> str:
    """Draw one panel and return it as SVG; `draw` gets the figure and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "nemotron3"}):
        figure = Figure(figsize=PANEL, layout="constrained")
        draw(figure, figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def step_axis(axes: Any) -> None:
    """Label x with whole steps, and mark the point of a series that has only one."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    for line in axes.lines:
        if len(line.get_xdata()) == 1 and line.get_marker() == "None":
            line.set_marker(".")
