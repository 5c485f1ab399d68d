"""The plots of the page."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.common import plots
from megatron_nemotron3.precision import report as precision
from megatron_nemotron3.train import summary as losses
from megatron_nemotron3.train.monitor import watch
from megatron_nemotron3.train.report.facts import NORM, RATE, TIME, Facts, Points


class Picture(NamedTuple):
    """A picture as the address of an image."""

    title: str
    source: str


def training(facts: Facts) -> Iterator[Picture]:
    """Losses, learning rate, norm of the gradient, time and tokens."""
    if facts.curve.steps:
        yield _picture("Losses", lambda axes: losses.draw(axes, facts.curve, None))
    elif facts.points("lm loss"):
        yield _picture("Losses", lambda axes: watch.draw_losses(axes, facts.history))
    seconds = [(i, ms / 1e3) for i, ms in facts.points(TIME)]
    for title, unit, points in (
        ("Learning rate", "", facts.points(RATE)),
        ("Norm of the gradient", "before clipping", facts.points(NORM)),
        ("Time of a step", "seconds", seconds),
        ("Tokens per second", "tokens/s", facts.tokens_per_second),
    ):
        if points:
            yield _line(title, unit, points)


def monitors(facts: Facts) -> Iterator[Picture]:
    """One panel per monitored quantity, as `nemotron3 watch` draws them."""
    for kind, series in watch.panels_of(facts.history).items():
        title = watch.KINDS[kind].title
        yield _picture(title, lambda axes, k=kind, s=series: watch.draw_panel(axes, k, s))


def quantization(facts: Facts) -> Picture | None:
    """The heat maps of the precision report."""
    if not facts.precision:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / precision.PICTURE
        precision.plot(facts.precision, path, facts.title)
        return Picture("Precision", _address("png", path.read_bytes()))


def _line(title: str, unit: str, points: Points) -> Picture:
    def draw(axes: Any) -> None:
        axes.plot(*zip(*points, strict=True))
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        plots.step_axis(axes)

    return _picture(title, draw)


def _picture(title: str, draw: Any) -> Picture:
    def panel(_: Any, axes: Any) -> None:
        draw(axes)
        axes.set_title("")  # the page has it

    return Picture(title, _address("svg+xml", plots.svg(panel).encode()))


def _address(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
