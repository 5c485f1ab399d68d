"""The losses of a run: read from what Megatron's training loop prints, in lines, and drawn."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import plots
from megatron_nemotron3.common.files import open_outside
from megatron_nemotron3.models.series import OF_STEP, display_name

#: In the folder of a run: the log, and the folder of the event files.
FILE, EVENTS = "train.log", "tensorboard"
#: What writes event files; without it Megatron writes none, and says so only in the log.
EVENT_MODULES = ("tensorboard", "google.protobuf")
#: Names of the time of a step and of the rate of the next step in a log line.
MILLISECONDS, RATE = "elapsed time per iteration (ms)", "learning rate"
_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|")
_ITEM = re.compile(r"\| ([^|:]+?): *([-+0-9.eE]+|nan|inf) ")
# In the training loop the line names no set: it is the validation set.
_VALID = re.compile(r"validation loss at iteration (\d+)(?: on (\w+) set)? \| lm loss value: ([-+0-9.eE]+)")
#: Tags of the training losses, also in event files.
_LOSS, MTP_LOSS = re.compile(r"(lm|mtp_\d+) loss"), re.compile(r"mtp_\d+ loss")
#: Up to this many lines of a picture are named.
NAMED = 12
#: Tag -> points (iteration, value), in order.
History = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class LogStep:
    """One log line of training: losses are nats per token, of its step.

    Megatron's means over the log interval count where the line has nothing else (models without experts).
    """

    iteration: int
    total: int
    values: dict[str, float]

    @property
    def loss(self) -> float:
        """Next-token loss, MTP not included; NaN, which Megatron leaves out of its line, if it has none."""
        return self.values.get("lm loss", math.nan)

    @property
    def mtp(self) -> list[float]:
        found = sorted(filter(MTP_LOSS.fullmatch, self.values))
        return [self.values[key] for key in found]

    @property
    def seconds(self) -> float:
        return self.values.get(MILLISECONDS, 0.0) / 1e3


@dataclass(frozen=True)
class Validation:
    """One evaluation: `which` is "validation" or "test"."""

    iteration: int
    which: str
    loss: float
    #: It was made after the end of training, on the batches that follow those of the last evaluation.
    again: bool = False


@dataclass
class Curve:
    """All losses of a log, one entry per iteration. If a step was trained twice, the later one counts.

    Megatron evaluates the last step twice: in the training loop and after it. There the first one counts.
    """

    steps: dict[int, LogStep] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    test: dict[int, float] = field(default_factory=dict)

    @property
    def history(self) -> History:
        """The numbers of the log lines by name."""
        found: History = {}
        for iteration, step in sorted(self.steps.items()):
            for name, value in step.values.items():
                found.setdefault(name, []).append((iteration, value))
        return found

    def correct(self, recorded: History) -> None:
        """Replace means over a log interval by the values of their last steps, which event files have."""
        for name, points in recorded.items():
            for iteration, value in points:
                if iteration in self.steps and name in self.steps[iteration].values:
                    self.steps[iteration].values[name] = value

    def add(self, line: str) -> LogStep | Validation | None:
        item = parse(line)
        if isinstance(item, LogStep):
            self.steps[item.iteration] = item
        elif isinstance(item, Validation):
            losses = self.validation if item.which == "validation" else self.test
            if not item.again or item.iteration not in losses:
                losses[item.iteration] = item.loss
        return item


def parse(line: str) -> LogStep | Validation | None:
    """Read a line of Megatron's log; None if it is neither of a step nor of an evaluation."""
    if (found := _VALID.search(line)) is not None:
        return Validation(int(found[1]), found[2] or "validation", float(found[3]), found[2] is not None)
    if (found := _STEP.search(line)) is not None and ("lm loss" in line or MILLISECONDS in line):
        values = {key.strip(): float(value) for key, value in _ITEM.findall(line)}
        of_step = {key.removesuffix(OF_STEP): values.pop(key) for key in [*values] if key.endswith(OF_STEP)}
        return LogStep(int(found[1]), int(found[2]), values | of_step)
    return None


def read(path: str) -> Curve:
    """Return the curve of a log file; empty if there is no file."""
    curve = Curve()
    try:
        with io.TextIOWrapper(open_outside(path), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                curve.add(line)
    except FileNotFoundError:
        pass
    return curve


def plot(curve: Curve, path: Path, title: str, baseline: float | None, of: str = "next token") -> None:
    """Write a PNG: training, MTP and validation loss in nats per token, the unigram baseline dashed."""
    with plots.picture(path, size=(8, 5), title=title) as (_, grid):
        axes = grid[0][0]
        draw_losses(axes, curve.history, curve.validation, of)
        if baseline is not None:
            axes.axhline(baseline, color="gray", ls="--", lw=1, label=f"unigram baseline {baseline:.3f}")
            axes.legend()


def draw_losses(
    axes: Any, history: History, validation: Mapping[int, float] | None = None, of: str = "next token"
) -> None:
    """Draw the losses of a log or of event files."""
    tags = sorted(filter(_LOSS.fullmatch, history))
    names = {tag: of if tag == "lm loss" else display_name(tag.removesuffix(" loss")) for tag in tags}
    draw(axes, {f"training, {name}": history[tag] for tag, name in names.items()}, "loss (nats per token)")
    if validation:
        axes.plot(*zip(*sorted(validation.items())), "ko", ms=5, label=f"validation, {of}")
    if axes.lines:
        axes.legend()


def draw(axes: Any, series: History, unit: str, *, log_scale: bool = False) -> None:
    """Draw a line a series. Of many the colours go from the first to the last, and only these are named."""
    many = len(series) > NAMED
    if many:
        from matplotlib import colormaps

        shades = (i / (len(series) - 1) for i in range(len(series)))
        axes.set_prop_cycle(color=[colormaps["viridis"](shade) for shade in shades])
    for label, points in series.items():
        axes.plot(*zip(*points), lw=1, label=label)
    if log_scale:
        axes.set_yscale("log")
    axes.set_ylabel(unit)
    plots.step_axis(axes)
    if len(series) > 1:
        axes.legend(handles=[axes.lines[0], axes.lines[-1]] if many else axes.lines, ncols=2, fontsize=6.5)


def zero_rate(curve: Curve) -> bool:
    """Whether the learning rate was zero at every logged step. A single one may end a decay to zero."""
    rates = [value for _, value in curve.history.get(RATE, ())]
    return len(rates) > 1 and not any(rates)


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
    if zero_rate(curve):
        lines.append(
            "learning rate    0 at every logged step, so no weight changed: check --lr and the schedule"
        )
    if curve.validation:
        step = max(curve.validation)
        loss = curve.validation[step]
        meaning = f"perplexity {math.exp(min(loss, 80)):,.1f}" if of == "next token" else f"of {of}"
        lines.append(f"validation loss  {loss:.3f} at step {step} ({meaning})")
        if baseline is not None:
            side = "below" if loss < baseline else "NOT below"
            lines.append(f"unigram baseline {baseline:.3f} on the same text: the model is {side} it")
    return lines
