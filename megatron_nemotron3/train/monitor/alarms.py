"""Rules of the warnings, and which of them are printed when: one line for one fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron_nemotron3.models.series import AGGREGATES, display_name
from megatron_nemotron3.train.monitor import signs
from megatron_nemotron3.train.monitor.signs import WINDOW, Point, Series, Sign, Signs, number

#: Measurements without a sign after which a row is over it: the next time is news.
CALM = 5
#: A row is settled if it was calm for `CALM` measurements and this many iterations.
SETTLED_STEPS = 50
#: Measurements from one line of a rule to the next; doubled for a row each time that it returns.
PAUSE = 10
#: Rows named in a line.
NAMED = 6
#: Length of the early phase of a run without bias updates, in iterations.
EARLY = 1000

_USED = re.compile(
    r"(max_vio|max_vio_interval|dead_experts_interval|expert_bias_spread|expert_bias_mean|residual_rms|"
    rf"zero_gradients|unchanged_weights)/.+|mtp_\d+ loss|{AGGREGATES}/"
    r"(learning_rate|experts|top_k(/.+)?|interval_tokens|bias_update_rate|lm_loss|loss_share|labels_ahead|equal_rows|"
    r"residual_rms_last_over_first)"
)


@dataclass(frozen=True)
class MonitorRule:
    """A rule, and the text of its warning after the numbers."""

    find: Callable[[Series], Signs]
    #: What it means, and what to do.
    advice: str
    #: Measurements in a row that must show it.
    persist: int = 2
    #: Whether young runs show it while they are healthy.
    early: bool = False
    #: Rules of one subject often see the same fault; one of them reports it.
    subject: str = ""
    #: Whether this one explains the others for as long as it lasts, not only what begins with it.
    explains: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__


_BALANCE = (
    "check --moe-router-bias-update-rate, the auxiliary loss, and that the router's weight is what it was; "
    "go back to a checkpoint from before it"
)
RULES: tuple[MonitorRule, ...] = (
    MonitorRule(
        signs.bias_drift,
        "The routing no longer follows the scores: compare the expert biases of the checkpoints before and "
        "after, and --moe-router-bias-update-rate; go back to the last one in which they agree with it.",
        persist=1,
        subject="router",
    ),
    MonitorRule(
        signs.router_collapse,
        f"The router sends nearly all tokens to the same experts; the others stop learning: {_BALANCE}.",
        early=True,
        subject="router",
        explains=True,
    ),
    MonitorRule(
        signs.router_outlier,
        "Ultra's first MoE layer went from 4.8 to 12 against 1.2 before the run diverged; the cause is "
        "unknown, BF16 throughout did not help, an earlier decay of the learning rate did. Keep checkpoints, "
        "watch expert_bias_spread and residual_rms of that layer, consider decaying the learning rate now.",
        persist=1,
        subject="router",
    ),
    MonitorRule(
        signs.dead_experts,
        f"Experts that no token reaches do not learn and do not come back by themselves: {_BALANCE}.",
        early=True,
        subject="router",
    ),
    MonitorRule(
        signs.few_loss_tokens,
        "Check the loss mask that the data set returns, and labels that it leaves out; long texts with short "
        "answers have such a mask.",
    ),
    MonitorRule(
        signs.no_gradient,
        "The layer does not learn: its output or its gradient is cut off or underflows; check that it is not "
        "frozen or bypassed, its flush to zero (--log-precision), and the loss mask.",
        subject="update",
    ),
    MonitorRule(
        signs.no_update,
        "They do not learn: check that the optimizer has them, that they are not frozen (requires_grad), the "
        "learning rate of their group, and the skipped iterations.",
        subject="update",
    ),
    MonitorRule(
        signs.learning_rate_zero,
        "Check --lr, --min-lr, --lr-decay-iters, --lr-warmup-init and the schedule in a loaded checkpoint.",
    ),
    MonitorRule(
        signs.wrong_labels,
        "Megatron's models do not shift them: the label of a token is the one that follows it.",
        persist=1,
    ),
    MonitorRule(
        signs.equal_rows,
        "Check the data set's __getitem__, the sampler, and whether there are more rows than in a step.",
    ),
    MonitorRule(
        signs.residual_jump,
        "A layer writes far more into the stream than before, which drowns what the others write: look at "
        "its output projection and the gradient norm, and go back to a checkpoint from before it.",
    ),
    MonitorRule(
        signs.mtp_loss_jump,
        "The main loss did not rise with it: check MTP's own layers, its labels and its mask, and go back to "
        "a checkpoint from before it.",
        subject="mtp",
    ),
    MonitorRule(
        signs.mtp_loss_rise,
        "In Ultra this came first when the output layer's gradient was accumulated in BF16, where the small "
        "share of the MTP depths is lost; FP32 gradient reduction cured it. Check --grad-reduce-in-bf16 and "
        "--main-grads-dtype, and go back to a checkpoint from before the rise.",
        persist=1,
        subject="mtp",
    ),
)


@dataclass(frozen=True)
class Alarm:
    """What a rule found, and what to do about it."""

    rule: str
    iteration: int
    message: str
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.message}"


@dataclass
class _Row:
    """What a rule saw in one row so far, counted in measurements."""

    #: With a firm sign in a row, and without any.
    firm: int = 0
    calm: int = 0
    calm_since: int = 0
    settled: bool = False
    reported: bool = False
    times: int = 0
    reported_at: int = 0

    def see(self, sign: Sign | None, iteration: int) -> None:
        if sign is None:
            self.calm += 1
            self.calm_since = iteration if self.calm == 1 else self.calm_since
            if self.calm >= CALM:
                self.reported = False
                self.settled = self.settled or iteration - self.calm_since >= SETTLED_STEPS
        else:
            self.calm = 0
        self.firm = self.firm + 1 if sign is not None and sign.firm else 0


class Watchdog:
    """Applies the rules as points arrive, and reports each fault once.

    A fault is reported when a rule has seen it in `persist` measurements in a row. All rows that show it by
    then share a line, and other rules of the subject are silent about it. A row is reported again only after
    `CALM` measurements without it. Routers of a young run are uneven while it is healthy, so until the early
    phase ends, only rows that had settled count. It lasts 1 / bias update rate iterations: in that time the
    update alone moves a bias across the whole range of a score.
    """

    def __init__(self) -> None:
        #: The last `WINDOW` points of every series that a rule examines.
        self.series: dict[str, list[Point]] = {}
        #: Everything that was found.
        self.findings: list[Alarm] = []
        self._rows: dict[tuple[str, str], _Row] = {}
        self._reported_at: dict[str, int] = {}
        self._measurements = 0

    def add(self, iteration: int, values: Mapping[str, float]) -> list[Alarm]:
        for tag, value in values.items():
            if value == value and _USED.fullmatch(tag):
                points = self.series.setdefault(tag, [])
                points.append((iteration, value))
                del points[:-WINDOW]
        self._measurements += 1
        found = [finding for rule in RULES if (finding := self._apply(rule, self.series, iteration))]
        self.findings += found
        return found

    def _apply(self, rule: MonitorRule, series: Series, iteration: int) -> Alarm | None:
        shown = rule.find(series)
        known = {row for name, row in self._rows if name == rule.name}
        for row in known | shown.keys() | _rows_of(series):
            self._rows.setdefault((rule.name, row), _Row()).see(shown.get(row), iteration)
        rate = number(series, "bias_update_rate")
        early = rule.early and iteration <= (1 / rate if rate else EARLY)
        news = [row for row in shown if self._is_news(rule, row, early)]
        if not any(self._rows[rule.name, row].firm >= rule.persist for row in news):
            return None
        if self._measurements < self._reported_at.get(rule.name, -PAUSE) + PAUSE:
            return None
        self._reported_at[rule.name] = self._measurements
        for row in news:
            state = self._rows[rule.name, row]
            state.reported, state.reported_at, state.times = True, self._measurements, state.times + 1
        return Alarm(rule.name, iteration, _message(rule, {row: shown[row] for row in news}), tuple(news))

    def _is_news(self, rule: MonitorRule, row: str, early: bool) -> bool:
        """Whether a row shows the fault, was not reported, and is not part of what another rule reported."""
        state = self._rows[rule.name, row]
        if not state.firm or state.reported or (early and not state.settled):
            return False
        if state.times and self._measurements < state.reported_at + PAUSE * 2**state.times:
            return False
        begun = self._measurements - state.firm
        family = [other for other in RULES if other.subject and other.subject == rule.subject]
        seen_by = {other: self._rows.get((other.name, row)) for other in family}
        return not any(
            seen is not None and seen.reported and (other.explains or begun <= seen.reported_at + PAUSE)
            for other, seen in seen_by.items()
        )


def _rows_of(series: Series) -> set[str]:
    """All routers: a row that never shows a sign is calm."""
    return {tag.partition("/")[2] for tag in series if tag.startswith("max_vio_interval/")}


def _message(rule: MonitorRule, shown: Mapping[str, Sign]) -> str:
    worst = max(shown, key=lambda row: shown[row].size)
    others = [display_name(row) for row in shown if row != worst]
    more = ""
    if others:
        named = ", ".join(others[:NAMED]) + (", …" if len(others) > NAMED else "")
        more = f" (and {len(others)} more: {named})"
    return f"{shown[worst].text}{more}. {rule.advice}"


def scan(history: Mapping[str, Iterable[Point]]) -> list[Alarm]:
    """Apply the rules to the history of a run, point by point, as they would have been applied during it."""
    steps: dict[int, dict[str, float]] = {}
    for tag, points in history.items():
        for iteration, value in points:
            steps.setdefault(iteration, {})[tag] = value
    watchdog = Watchdog()
    # Megatron also logs MTP losses at iterations that the monitors do not measure.
    measured = [i for i in sorted(steps) if any(tag.startswith("max_vio/") for tag in steps[i])]
    return [finding for i in measured for finding in watchdog.add(i, steps[i])]
