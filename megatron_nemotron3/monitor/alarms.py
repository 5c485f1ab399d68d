"""Warnings for the two signs that preceded Ultra's divergences. Standard library only.

From the Ultra report (arXiv 2606.15007):

1. At about 8T tokens the output layer's gradient was accumulated in BF16, whose mantissa lost the small
   contribution of the MTP depths. The loss of MTP depth 2 rose first. FP32 gradient reduction cured it.
2. At about 16T tokens MaxVio of the first MoE layer rose from 4.8 to 12 while the median layer stayed at 1.2.
   The cause is unknown. An earlier decay of the learning rate helped; BF16 throughout did not.

A rule is a pure function: it takes series (tag -> points (iteration, value), in order) and returns a finding
or None.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_nemotron3.monitor.series import is_decoder, spoken

Point = tuple[int, float]
Series = Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Threshold:
    """A number that a rule compares with, and its source."""

    value: float
    source: str


THRESHOLDS: dict[str, Threshold] = {
    "max_vio_over_median": Threshold(
        6.0, "Ultra report: 4.8 / 1.2 = 4 while the run was healthy, 12 / 1.2 = 10 at the divergence"
    ),
    "min_moe_layers": Threshold(4, "this package: below that a median over layers says nothing"),
    "mtp_rise": Threshold(0.03, "this package (the report gives no number): 3 % of the depth's own loss"),
    "mtp_rise_in_sigma": Threshold(6.0, "this package: no false alarm from noise, see tests/monitor"),
    "mtp_rise_over_shallower": Threshold(
        2.0, "Ultra report: depth 2 rose first; a bad batch or new data moves all depths"
    ),
    "mtp_history": Threshold(40, "this package: points needed before a rise means anything"),
}
#: Points of the running median, so that a single bad batch is no finding.
SMOOTH = 5
#: Points of history that are kept and examined.
WINDOW = 200


@dataclass(frozen=True)
class Finding:
    """What a rule found, and what to do about it."""

    rule: str
    iteration: int
    message: str

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.message}"


def router_outlier(series: Series) -> Finding | None:
    """Find an MoE layer that loses its balance while the others keep theirs (Ultra's second divergence)."""
    layers = {
        row: points
        for tag, points in series.items()
        if tag.startswith("max_vio/") and is_decoder(row := tag.removeprefix("max_vio/"))
        if len(points) >= SMOOTH
    }
    if len(layers) < THRESHOLDS["min_moe_layers"].value:
        return None
    now = {row: statistics.median(v for _, v in points[-SMOOTH:]) for row, points in layers.items()}
    median = statistics.median(now.values())
    worst = max(now, key=now.__getitem__)
    if now[worst] < THRESHOLDS["max_vio_over_median"].value * median:
        return None
    begun, before = layers[worst][0]
    iteration = layers[worst][-1][0]
    return Finding(
        "router_outlier",
        iteration,
        f"MaxVio of {spoken(worst)} is {now[worst]:.1f} ({before:.1f} at iteration {begun}), "
        f"{now[worst] / median:.1f} times the median layer's {median:.1f}. Ultra's first MoE layer went from "
        "4.8 to 12 against 1.2 before the run diverged; the cause is unknown, BF16 throughout did not help, "
        "an earlier decay of the learning rate did. Keep checkpoints, watch expert_bias_spread and "
        "residual_rms of that layer, consider decaying the learning rate now.",
    )


def mtp_loss_rise(series: Series) -> Finding | None:
    """Find a loss of the deepest MTP depth that rises more than that of the depth before (Ultra's first)."""
    depths = sorted(
        (int(found[1]), series[tag]) for tag in series if (found := re.fullmatch(r"mtp_(\d+) loss", tag))
    )
    if not depths or len(depths[-1][1]) < THRESHOLDS["mtp_history"].value:
        return None
    depth, points = depths[-1]
    smooth = _running_median(points)
    # Windows that share no point with the last window.
    lowest = min(range(len(smooth) - SMOOTH), key=smooth.__getitem__)
    rise = smooth[-1] - smooth[lowest]
    limit = max(
        THRESHOLDS["mtp_rise"].value * smooth[lowest],
        THRESHOLDS["mtp_rise_in_sigma"].value * _point_noise(points),
    )
    if rise < limit:
        return None
    other = ""
    if len(depths) > 1:
        shallower = _running_median(depths[-2][1])
        moved = (
            shallower[-1] - shallower[lowest]
        )  # since the same iteration: both depths saw the same batches
        if rise < THRESHOLDS["mtp_rise_over_shallower"].value * moved:
            return None
        other = f", depth {depths[-2][0]}'s changed by {moved:+.3f}"
    return Finding(
        "mtp_loss_rise",
        points[-1][0],
        f"the loss of MTP depth {depth} rose by {rise:.3f} to {smooth[-1]:.3f}{other}. In Ultra this came "
        "first when the output layer's gradient was accumulated in BF16, where the small share of the MTP "
        "depths is lost; FP32 gradient reduction cured it. Check --grad-reduce-in-bf16 and "
        "--main-grads-dtype, and go back to a checkpoint from before the rise.",
    )


def _running_median(points: Sequence[Point]) -> list[float]:
    """Running median of the values; the i-th is that of points i to i + SMOOTH - 1."""
    values = [value for _, value in points]
    return [statistics.median(values[i : i + SMOOTH]) for i in range(len(values) - SMOOTH + 1)]


def _point_noise(points: Sequence[Point]) -> float:
    """Standard deviation of a point, from differences of neighbors, which excludes trends and outliers."""
    steps = [abs(after - before) for (_, before), (_, after) in zip(points, points[1:])]
    # 1.4826 is the ratio of a normal distribution's standard deviation to the median of |x|.
    return 1.4826 * statistics.median(steps) / math.sqrt(2)


RULES: tuple[Callable[[Series], Finding | None], ...] = (router_outlier, mtp_loss_rise)
_USED = re.compile(r"max_vio/layer_\d+|mtp_\d+ loss")


class Watchdog:
    """Applies the rules as points arrive; each rule reports once."""

    def __init__(self) -> None:
        #: The last `WINDOW` points of every series that a rule examines.
        self.series: dict[str, deque[Point]] = {}
        self._silent: set[str] = set()

    def add(self, iteration: int, values: Mapping[str, float]) -> list[Finding]:
        """Add the values (tag -> value) of an iteration; return new findings."""
        for tag, value in values.items():
            if _USED.fullmatch(tag):
                self.series.setdefault(tag, deque(maxlen=WINDOW)).append((iteration, value))
        # Rules slice the points, which a deque does not support.
        series = {tag: list(points) for tag, points in self.series.items()}
        found = [f for rule in RULES if rule.__name__ not in self._silent and (f := rule(series))]
        self._silent.update(finding.rule for finding in found)
        return found


def scan(history: Mapping[str, Iterable[Point]]) -> list[Finding]:
    """Apply the rules to the history of a run, point by point, as they would have been applied during it."""
    steps: dict[int, dict[str, float]] = {}
    for tag, points in history.items():
        for iteration, value in points:
            steps.setdefault(iteration, {})[tag] = value
    watchdog = Watchdog()
    # Megatron also logs MTP losses at iterations that the monitors do not measure.
    measured = [i for i in sorted(steps) if any(tag.startswith("max_vio/") for tag in steps[i])]
    return [finding for i in measured for finding in watchdog.add(i, steps[i])]
