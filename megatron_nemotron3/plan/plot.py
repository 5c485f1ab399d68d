"""Memory of layouts as bars, by class."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_nemotron3.checkpoint.files import save_figure
from megatron_nemotron3.plan.report import GB, memory_classes
from megatron_nemotron3.plan.search import Answer


def memory_bars(answer: Answer, path: Path) -> None:
    """One bar a layout, stacked by class, with the line of what fits.

    Raises:
        ValueError: no layout to show.
        OSError: the file cannot be written.
    """
    shown = answer.best or ((answer.smallest,) if answer.smallest else ())
    if not shown:
        raise ValueError("no layout to plot: nothing is legal")
    question = answer.question
    bars = [memory_classes(found.memory) for found in shown]
    classes = list(dict.fromkeys(name for bar in bars for name in bar))
    labels = [f"{found.layout}\nmicro {found.micro_batch_size}, {found.recompute}" for found in shown]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.7 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    colors = plt.get_cmap("tab20").colors
    for number, name in enumerate(classes):
        sizes = [bar.get(name, 0.0) / GB for bar in bars]
        axes.barh(labels, sizes, left=left, label=name, color=colors[number % len(colors)])
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(question.limit / GB, color="black", linestyle="--", linewidth=1, label="fits")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("GB on the fullest rank")
    axes.set_title(f"{question.config.name} on {question.gpus:,} {question.gpu.name}, {question.precision}")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path)
