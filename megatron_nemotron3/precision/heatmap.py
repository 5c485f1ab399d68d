"""The picture of a precision report: layers down, kinds of linears across; a panel per quantity."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.checkpoint.files import save_figure
from megatron_nemotron3.precision.report import GRADIENT, TENSORS, Row, last
from megatron_nemotron3.precision.table import NVFP4

#: Labels on the depth axis at most.
LABELS = 24


class _Panel(NamedTuple):
    tensor: str
    #: Column of `Row`.
    column: str
    title: str
    unit: str
    scale: float
    colors: str


def _panels(rows: Sequence[Row]) -> list[list[_Panel]]:
    """Flush-to-zero above, SQNR below; the zeros of the weight gradient at the end of the second row.

    The weight of dgrad is shown if it is NVFP4 (`2d=0`), else it is MXFP8's, and in the table.
    """
    tensors = {row.tensor for row in rows if row.tensor != "dgrad.weight" or row.format == NVFP4}
    shown = [name for name in TENSORS if name in tensors and name != GRADIENT]
    above = [
        _Panel(t, "flushed", f"{TENSORS[t]}: flushed to zero", "% of nonzero elements", 100, "viridis")
        for t in shown
    ]
    below = [_Panel(t, "sqnr_db", f"{TENSORS[t]}: SQNR", "dB", 1, "viridis_r") for t in shown]
    if GRADIENT in tensors:
        below.append(_Panel(GRADIENT, "zeros", "weight gradient: zeros", "% of elements", 100, "viridis"))
    return [above, below]


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG of the last measurement. Gray: no such linear, or nothing to divide by. Whole or not there.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the PNG cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    now = last(rows)
    layers = _layers(now)
    kinds = list(dict.fromkeys((row.module, row.format) for row in now))
    panels = _panels(now)
    columns = max(map(len, panels))
    size = ((1.6 + 0.28 * len(kinds)) * columns, 3.2 + 2 * min(9.0, max(2.0, 0.13 * len(layers))))
    figure, grid = plt.subplots(2, columns, figsize=size, dpi=110, squeeze=False, layout="constrained")
    for row, (axes_of_row, panels_of_row) in enumerate(zip(grid, panels)):
        for axes in axes_of_row[len(panels_of_row) :]:
            axes.set_axis_off()
        for column, (axes, panel) in enumerate(zip(axes_of_row, panels_of_row)):
            _draw(figure, axes, panel, now, layers, kinds)
            _axes(axes, layers if column == 0 else [], len(layers), kinds if row else [], len(kinds))
    what = "as computed" if now[0].used else "as NVFP4 would compute"
    figure.suptitle(f"{title}, iteration {now[0].iteration}, {what}")
    save_figure(figure, path)


def _layers(rows: Sequence[Row]) -> list[str]:
    """Labels of the depth axis: every decoder layer up to the last one measured, then MTP."""
    found = {row.layer for row in rows}
    numbers = [int(m[1]) for name in found if (m := re.fullmatch(r"layer_(\d+)", name))]
    decoder = [f"layer_{n:03d}" for n in range(1, max(numbers, default=0) + 1)]
    return [*decoder, *sorted(found - set(decoder))]


def _draw(
    figure: Any,
    axes: Any,
    panel: _Panel,
    rows: Sequence[Row],
    layers: list[str],
    kinds: list[tuple[str, str]],
) -> None:
    """One panel. Colors span the NVFP4 linears if there are any: MXFP8 is 12 dB away and lies beyond."""
    axes.set_facecolor("0.85")
    table = [[math.nan] * len(kinds) for _ in layers]
    values: dict[str, list[float]] = {}
    for row in rows:
        value = panel.scale * getattr(row, panel.column)
        if row.tensor == panel.tensor and math.isfinite(value):
            table[layers.index(row.layer)][kinds.index((row.module, row.format))] = value
            values.setdefault(row.format, []).append(value)
    every = [v for found in values.values() for v in found]
    spanned = values.get(NVFP4) or every
    low = 0.0 if panel.scale == 100 else min(spanned, default=0.0)
    high = max(spanned, default=1.0)
    high = high if high > low else low + 1.0
    image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap=panel.colors, vmin=low, vmax=high)
    beyond = "max" if max(every, default=high) > high else "neither"
    bar = figure.colorbar(image, ax=axes, extend=beyond)
    bar.set_label(panel.unit, fontsize=7)
    bar.ax.tick_params(labelsize=6)
    axes.set_title(panel.title, fontsize=9)


def _axes(axes: Any, layers: list[str], depth: int, kinds: list[tuple[str, str]], across: int) -> None:
    """Ticks everywhere, labels where they are given."""
    ticks = range(0, depth, -(-depth // LABELS))
    axes.set_yticks(list(ticks), [layers[t] for t in ticks] if layers else [], fontsize=6)
    if layers:
        axes.set_ylabel("depth (layer)", fontsize=7)
    names = [f"{re.sub(r'^(mixer|mlp)[.]', '', module)} ({fmt})" for module, fmt in kinds]
    axes.set_xticks(range(across), names, rotation=90, fontsize=6)
    if kinds:
        axes.set_xlabel("linear (format)", fontsize=7)
