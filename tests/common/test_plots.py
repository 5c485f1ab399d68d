"""Pictures of many layers stay readable, and all have one look."""

from __future__ import annotations

from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from megatron_nemotron3.common import plots
from megatron_nemotron3.models import get
from megatron_nemotron3.models.series import KINDS, decoder_row, display_name, mtp_row
from megatron_nemotron3.train.log import NAMED
from megatron_nemotron3.train.monitor.watch import draw_panel

ULTRA = [decoder_row(n) for n in range(1, get("ultra").num_layers + 1)]
MTP = [mtp_row(depth, layer) for depth in (1, 2) for layer in (1, 2)]


def drawn(kind: str, rows: list[str], steps: list[int]) -> tuple[Figure, Any]:
    """A panel of `report monitors`, laid out."""
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=plots.PANEL, dpi=plots.DPI, layout="constrained")
        axes = figure.subplots()
        draw_panel(axes, kind, {name: [(s, 1.0 + s) for s in steps] for name in rows})
        figure.canvas.draw()
    return figure, axes


def overlapping(figure: Figure, labels: list[Any]) -> list[tuple[str, str]]:
    """Neighboring labels that cover each other."""
    shown = [label for label in labels if label.get_text()]
    boxes = [label.get_window_extent() for label in shown]
    pairs = zip(shown, shown[1:], boxes, boxes[1:])
    return [(a.get_text(), b.get_text()) for a, b, one, other in pairs if one.overlaps(other)]


@pytest.mark.parametrize(("rows", "steps"), [(ULTRA + MTP, [1, 10, 20, 30]), (MTP, [1])])
def test_labels_of_layers_are_readable(rows: list[str], steps: list[int]) -> None:
    figure, axes = drawn("residual_rms", rows, steps)
    assert axes.get_xlabel() == "step"
    assert not overlapping(figure, axes.get_yticklabels())
    assert not overlapping(figure, axes.get_xticklabels())
    low, high = axes.get_xlim()
    shown = [
        label.get_text() for at, label in zip(axes.get_xticks(), axes.get_xticklabels()) if low < at < high
    ]
    assert shown and all(float(text).is_integer() for text in shown)
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == [display_name(name) for name in (rows if len(rows) <= NAMED else (rows[0], rows[-1]))]
    assert axes.get_ylabel() == KINDS["residual_rms"].unit
    assert len({line.get_color() for line in axes.lines}) == len(rows)


def test_a_picture_for_a_page_is_svg_with_its_text_and_no_date() -> None:
    def draw(figure: Any, axes: Any) -> None:
        axes.plot([1], [2.0])
        plots.step_axis(axes)

    text = plots.svg(draw)
    assert text == plots.svg(draw)
    assert "<svg" in text and ">step<" in text and "dc:date" not in text
