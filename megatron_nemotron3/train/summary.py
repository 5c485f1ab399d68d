"""Report a run: lines on its losses, and a plot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import plots
from megatron_nemotron3.train.log import Curve


def plot(curve: Curve, path: Path, title: str, baseline: float | None, of: str = "next token") -> None:
    """Write a PNG: training, MTP and validation loss in nats per token, the unigram baseline dashed."""
    with plots.picture(path, size=(8, 5), title=title) as (_, grid):
        draw(grid[0][0], curve, baseline, of)


def draw(axes: Any, curve: Curve, baseline: float | None, of: str = "next token") -> None:
    """Draw the losses of a run."""
    steps = sorted(curve.steps)
    axes.plot(steps, [curve.steps[i].loss for i in steps], label=f"training, {of}", zorder=3)
    for depth in range(max((len(curve.steps[i].mtp) for i in steps), default=0)):
        values = [(i, curve.steps[i].mtp[depth]) for i in steps if len(curve.steps[i].mtp) > depth]
        axes.plot(*zip(*values), lw=1, alpha=0.7, label=f"training, MTP depth {depth + 1}")
    if curve.validation:
        points = sorted(curve.validation.items())
        axes.plot(*zip(*points), "ko", ms=5, label=f"validation, {of}")
    if baseline is not None:
        axes.axhline(baseline, color="gray", ls="--", lw=1, label=f"unigram baseline {baseline:.3f}")
    axes.set_ylabel("loss (nats per token)")
    plots.step_axis(axes)
    axes.legend()


def verdict(curve: Curve, baseline: float | None, of: str = "next token") -> list[str]:
    """Return lines on the losses: training at first and last, and validation against the baseline."""
    if not curve.steps:
        return ["no step was logged"]
    first, last = curve.steps[min(curve.steps)], curve.steps[max(curve.steps)]
    lines = [
        f"training loss    {first.loss:.3f} at step {first.iteration} -> {last.loss:.3f} at {last.iteration}"
    ]
    if last.mtp:
        depths = ", ".join(f"depth {k}: {loss:.3f}" for k, loss in enumerate(last.mtp, 1))
        lines.append(f"MTP loss         {depths}")
    if curve.validation:
        step = max(curve.validation)
        loss = curve.validation[step]
        meaning = f"perplexity {math.exp(min(loss, 80)):,.1f}" if of == "next token" else f"of {of}"
        lines.append(f"validation loss  {loss:.3f} at step {step} ({meaning})")
        if baseline is not None:
            side = "below" if loss < baseline else "NOT below"
            lines.append(f"unigram baseline {baseline:.3f} on the same text: the model is {side} it")
    return lines
