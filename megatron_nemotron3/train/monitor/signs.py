"""Signs that something is wrong with a run: pure functions over its measurements.

A function takes series (tag -> points (iteration, value), in order) and returns what it sees now: row ->
`Sign`. It has no state. `alarms` has the meaning of a sign, and decides what is printed.

The two divergences of the Ultra report (arXiv 2606.15007):

1. At about 8T tokens the output layer's gradient was accumulated in BF16, whose mantissa lost the small
   contribution of the MTP depths. The loss of MTP depth 2 rose first. FP32 gradient reduction cured it.
2. At about 16T tokens MaxVio of the first MoE layer rose from 4.8 to 12 while the median layer stayed at 1.2.
   The cause is unknown. An earlier decay of the learning rate helped; BF16 throughout did not.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_nemotron3.models.series import AGGREGATES, display_name, is_decoder

Point = tuple[int, float]
Series = Mapping[str, Sequence[Point]]


#: What the rules compare with.
THRESHOLDS: dict[str, float] = {
    # Above every healthy run of tests/golden/healthy_runs.npz.
    "collapse": 0.9,  # share of the way from balance (1) to the bound (experts / top-k)
    "collapse_jump": 4.0,  # times the layer's own excess over 1
    "alike": 20,  # tokens of a text that count as one independent choice
    "dead_share": 0.02,  # of a layer's experts, at least 2 of them
    "no_gradient": 0.99,  # units of squared ReLU that never fire reach 0.8
    "residual_jump": 10.0,  # times the layer's own RMS, or last / first
    "mtp_jump_in_sigma": 4.0,  # where 3.1 was the most
    # From the Ultra report.
    "collapse_jump_share": 0.5,  # 12 of 23.3 at the divergence is 0.49, 4.8 before 0.17
    "max_vio_over_median": 6.0,  # 4.8 / 1.2 = 4 while the run was healthy, 12 / 1.2 = 10 at the divergence
    "residual_ratio": 1e5,  # norms differ by 4 orders of magnitude over depth
    "mtp_rise_over_shallower": 2.0,  # depth 2 rose first; a bad batch or new data moves all depths
    # Of this package.
    "uneven": 0.5,  # below half of the way to the bound a layer counts as settled
    "min_moe_layers": 4,  # below that a median over layers says nothing
    "dead_chance": 1e-6,  # of so many idle experts under balance
    "dead_settled": 1e-2,  # the same, below which a layer is not settled
    "dead_history": 10,  # measurements after which a single dead expert counts
    "bias_step": 1.05,  # 1 is the fastest that Megatron's update moves a bias
    "bias_range": 1.0,  # the range of a sigmoid score
    "few_tokens": 0.1,  # share of the tokens of a step
    "mtp_jump": 0.1,  # share of the main loss
    "mtp_jump_own": 0.5,  # share of the jump by which the MTP loss itself rose; the main loss may also fall
    "mtp_rise": 0.03,  # of the depth's own loss; the report gives no number
    "mtp_rise_in_sigma": 6.0,  # no false alarm from noise, see tests/train/monitor
    "mtp_history": 40,  # points needed before a rise means anything
}
#: Points of the running median, so that a single bad batch is no finding.
SMOOTH = 5
#: Points of history that are kept and examined.
WINDOW = 200
#: A jump is measured against the median of up to this many points before the last `RECENT`.
BASE = 20
LEAST_BASE = 5
RECENT = 3
#: Where a warning has a level, its row is calm again below this share of it.
OVER = 0.75


@dataclass(frozen=True)
class Sign:
    """What a rule sees in one row: `text` has the number and its bound, `size` says which row is worst.

    One that is not `firm` is no reason to warn, but the row is not settled either.
    """

    text: str
    size: float
    firm: bool = True


Signs = dict[str, Sign]


def number(series: Series, name: str) -> float | None:
    """The last value of a number of the run, such as `experts`."""
    points = series.get(f"{AGGREGATES}/{name}")
    return points[-1][1] if points else None


def top_k(series: Series, row: str) -> float | None:
    """Experts per token of a router: its own number where layers differ, else that of all."""
    own = number(series, f"top_k/{row}")
    return number(series, "top_k") if own is None else own


def router_collapse(series: Series) -> Signs:
    """Find routers that send their tokens to few experts: MaxVio over the interval, against its bound."""
    experts = number(series, "experts")
    found: Signs = {}
    for row, points in _rows(series, "max_vio_interval"):
        topk = top_k(series, row)
        if not experts or not topk or experts <= topk:
            continue
        bound, value = experts / topk, points[-1][1]
        share = (value - 1) / (bound - 1)
        before = _base(points)
        jumped = (
            before is not None
            and share >= THRESHOLDS["collapse_jump_share"]
            and value - 1 >= THRESHOLDS["collapse_jump"] * (before - 1)
        )
        firm = share >= THRESHOLDS["collapse"] or jumped
        if firm or share >= THRESHOLDS["uneven"]:
            was = "" if before is None else f", from {before:.2f}"
            text = f"MaxVio of {display_name(row)} is {value:.2f}{was}; {bound:.2f} is the most possible"
            found[row] = Sign(text, share, firm)
    return found


def router_outlier(series: Series) -> Signs:
    """Find an MoE layer that loses its balance while the others keep theirs (Ultra's second divergence)."""
    # MaxVio lies between 1 and experts / top-k. Where top-k differs by layer (Puzzle), the excess over 1 is
    # scaled to the median layer's bound before layers are compared.
    layers = {
        row: points for row, points in _rows(series, "max_vio") if is_decoder(row) and len(points) >= SMOOTH
    }
    if len(layers) < THRESHOLDS["min_moe_layers"]:
        return {}
    bounds = _bounds(series, layers)
    usual = statistics.median(bounds.values()) if bounds else math.nan
    now = {row: statistics.median(v for _, v in points[-SMOOTH:]) for row, points in layers.items()}
    scaled = {
        row: 1 + (value - 1) * (usual - 1) / (bounds[row] - 1) if bounds and bounds[row] != usual else value
        for row, value in now.items()
    }
    median = statistics.median(scaled.values())
    limit = THRESHOLDS["max_vio_over_median"] * median
    found: Signs = {}
    for row, value in scaled.items():
        if value >= OVER * limit:
            begun, before = layers[row][0]
            scale = "," if value == now[row] else f" of {bounds[row]:.1f}; {value:.1f} of {usual:.1f} is"
            found[row] = Sign(
                f"MaxVio of {display_name(row)} is {now[row]:.1f} ({before:.1f} at iteration {begun}){scale} "
                f"{value / median:.1f} times the median layer's {median:.1f}",
                value,
                value >= limit,
            )
    return found


def _bounds(series: Series, rows: Iterable[str]) -> dict[str, float]:
    """The most that MaxVio of each row can be, experts / top-k; empty where that is not known of all rows."""
    experts = number(series, "experts")
    found = {row: experts / topk for row in rows if experts and (topk := top_k(series, row))}
    return found if found.keys() == set(rows) and min(found.values(), default=0) > 1 else {}


def dead_experts(series: Series) -> Signs:
    """Find experts without a token in a whole interval, where balance would have given each of them some."""
    experts, tokens = number(series, "experts"), number(series, "interval_tokens")
    if not experts or not tokens:
        return {}
    many = max(2, math.ceil(THRESHOLDS["dead_share"] * experts))
    history = int(THRESHOLDS["dead_history"])
    found: Signs = {}
    for row, points in _rows(series, "dead_experts_interval"):
        topk, dead = top_k(series, row), points[-1][1]
        if not topk or experts <= topk:
            continue
        # Each of T independent tokens leaves an expert out with probability 1 - k / N.
        independent = tokens / THRESHOLDS["alike"]
        expected = experts * math.exp(independent * math.log1p(-topk / experts))
        chance = _at_least(int(dead), expected)
        if chance > THRESHOLDS["dead_settled"]:
            continue
        unlikely = dead >= many and chance <= THRESHOLDS["dead_chance"]
        long = len(points) >= history and all(value >= 1 for _, value in points[-history:])
        steps = points[-1][0] - points[-2][0] if len(points) > 1 else points[-1][0]
        text = (
            f"{dead:.0f} of {experts:.0f} experts of {display_name(row)} got none of {tokens:,.0f} tokens in "
            f"{steps} steps; balance would leave out {expected:.1g}"
        )
        found[row] = Sign(text, dead, unlikely or long)
    return found


def no_gradient(series: Series) -> Signs:
    """Find layers whose weights get no gradient."""
    limit = THRESHOLDS["no_gradient"]
    return {
        row: Sign(
            f"{100 * share:.1f} % of the gradients of {display_name(row)} are exactly zero",
            share,
            share >= limit,
        )
        for row, points in _rows(series, "zero_gradients")
        if (share := points[-1][1]) >= OVER * limit
    }


def no_update(series: Series) -> Signs:
    """Find modules whose weights are what they were although the learning rate is not zero."""
    if number(series, "learning_rate") == 0:
        return {}
    return {
        row: Sign(f"the weights of {display_name(row)} are bit by bit those of the measurement before", 1.0)
        for row, points in _rows(series, "unchanged_weights")
        if points[-1][1] == 1
    }


def learning_rate_zero(series: Series) -> Signs:
    """Find a learning rate of zero."""
    zero = number(series, "learning_rate") == 0
    return {"run": Sign("the optimizer stepped with learning rate 0: no weight changes", 1.0)} if zero else {}


def wrong_labels(series: Series) -> Signs:
    """Find labels that are not those of the next token."""
    ahead = number(series, "labels_ahead")
    if ahead is None or ahead == 1:
        return {}
    what = "the token after the next one" if ahead else "the token itself"
    return {"run": Sign(f"nearly all labels are {what}, not the next token", 1.0)}


def equal_rows(series: Series) -> Signs:
    """Find a step in which all rows of each rank are the same, or those of the step measured before."""
    which = {1: "the same on each rank, token by token", 2: "those of the measurement before"}
    what = which.get(int(number(series, "equal_rows") or 0))
    return {"run": Sign(f"all rows of a step are {what}", 1.0)} if what else {}


def few_loss_tokens(series: Series) -> Signs:
    """Find a loss mask of zeros, or of few tokens."""
    share = number(series, "loss_share")
    if share is None or share >= THRESHOLDS["few_tokens"]:
        return {}
    none = "no token of the step counts in the loss: nothing is learned"
    few = f"only {100 * share:.2g} % of the tokens of a step count in the loss"
    return {"run": Sign(few if share else none, 1.0)}


def residual_jump(series: Series) -> Signs:
    """Find a sudden growth of the residual stream, or one over depth that no published run had."""
    jump, most = THRESHOLDS["residual_jump"], THRESHOLDS["residual_ratio"]
    found: Signs = {}
    layers = [(row, points[-1][1], _base(points)) for row, points in _rows(series, "residual_rms")]
    for i, (row, now, before) in enumerate(layers):
        if before and now >= jump * before:
            text = f"residual RMS behind {display_name(row)} is {now:.3G}, from {before:.3G}"
            found[row] = Sign(text, _growth(layers, i))
    ratio = series.get(f"{AGGREGATES}/residual_rms_last_over_first")
    decoder = [i for i, (row, _, _) in enumerate(layers) if is_decoder(row)]
    if not ratio or len(decoder) < 2 or any(is_decoder(row) for row in found):
        return found
    now, before = ratio[-1][1], _base(ratio)
    jumped = bool(before) and now >= jump * (before or 0.0)
    if jumped or now >= OVER * most:
        steepest = max(decoder[1:], key=lambda i: _growth(layers, i))
        where, row = layers[steepest][0], layers[decoder[-1]][0]
        was = "" if before is None else f", from {before:.3G}"
        place = display_name(where)
        text = f"residual RMS, last layer over first, is {now:.3G}{was}; it grew most across {place}"
        found[row] = Sign(text, now, jumped or now >= most)
    return found


def _growth(layers: Sequence[tuple[str, float, float | None]], i: int) -> float:
    """How many times more than before the stream grows across the i-th of layers (row, RMS now, before)."""
    _, now, before = layers[i]
    grown = now / (before or 1.0)
    if i and is_decoder(layers[i][0]):
        _, now, before = layers[i - 1]
        grown *= (before or 1.0) / max(now, 1e-30)
    return grown


def bias_drift(series: Series) -> Signs:
    """Find expert biases that something else than their update moves, or that outweigh every score."""
    rate = number(series, "bias_update_rate")
    found: Signs = {}
    means = dict(_rows(series, "expert_bias_mean"))
    for row, points in _rows(series, "expert_bias_spread"):
        now = points[-1][1]
        if now >= OVER * (limit := THRESHOLDS["bias_range"]):
            found[row] = Sign(
                f"the expert biases of {display_name(row)} differ by up to {now:.2f}; scores differ by less "
                "than 1",
                now,
                now >= limit,
            )
        if rate is None:
            continue
        for what, moved, most in (("spread", points, 2 * rate), ("mean", means.get(row, ()), rate)):
            if len(moved) < 2:
                continue
            (begun, before), (iteration, after) = moved[-2:]
            speed = abs(after - before) / (iteration - begun)
            if speed > THRESHOLDS["bias_step"] * most + 1e-5:
                found[row] = Sign(
                    f"the {what} of the expert biases of {display_name(row)} moved by {speed:.2g} per step; "
                    f"their update moves it by at most {most:.2g}",
                    speed,
                )
    return found


def mtp_loss_jump(series: Series) -> Signs:
    """Find an MTP loss that leaves the main loss behind."""
    main = dict(series.get(f"{AGGREGATES}/lm_loss", ()))
    found: Signs = {}
    for depth, points in _depths(series):
        gap = [(i, value - main[i]) for i, value in points if i in main]
        # The loss of one batch is noise that both losses share; what is left is the noise of the gap.
        before = _base(gap, least=2 * LEAST_BASE)
        if before is None:
            continue
        now, lm_loss = gap[-1][1], main[gap[-1][0]]
        noise = THRESHOLDS["mtp_jump_in_sigma"] * _point_noise(gap[-BASE - RECENT : -RECENT])
        limit = max(THRESHOLDS["mtp_jump"] * lm_loss, noise)
        own = points[-1][1] - (_base(points) or 0.0)
        if now - before >= OVER * limit and own >= THRESHOLDS["mtp_jump_own"] * (now - before):
            text = (
                f"the loss of MTP depth {depth} is {points[-1][1]:.3f}, {now:+.3f} from the main loss; "
                f"before, {before:+.3f} (limit {before + limit:+.3f})"
            )
            found[f"mtp_{depth}"] = Sign(text, now - before, now - before >= limit)
    return found


def mtp_loss_rise(series: Series) -> Signs:
    """Find a loss of the deepest MTP depth that rises more than that of the depth before (Ultra's first)."""
    depths = _depths(series)
    if not depths or len(depths[-1][1]) < THRESHOLDS["mtp_history"]:
        return {}
    depth, points = depths[-1]
    smooth = _running_median(points)
    # Windows that share no point with the last window.
    lowest = min(range(len(smooth) - SMOOTH), key=smooth.__getitem__)
    rise = smooth[-1] - smooth[lowest]
    noise = THRESHOLDS["mtp_rise_in_sigma"] * _point_noise(points)
    limit = max(THRESHOLDS["mtp_rise"] * smooth[lowest], noise)
    other = ""
    if len(depths) > 1:
        shallower = _running_median(depths[-2][1])
        # Since the same iteration: both depths saw the same batches.
        moved = shallower[-1] - shallower[lowest]
        limit = max(limit, THRESHOLDS["mtp_rise_over_shallower"] * moved)
        other = f", depth {depths[-2][0]}'s changed by {moved:+.3f}"
    text = f"the loss of MTP depth {depth} rose by {rise:.3f} to {smooth[-1]:.3f}{other}"
    return {f"mtp_{depth}": Sign(text, rise, rise >= limit)} if rise >= OVER * limit else {}


def _rows(series: Series, kind: str) -> Iterator[tuple[str, Sequence[Point]]]:
    """Row and points of each row of a kind that was measured at the last iteration of any, in order."""
    prefix = f"{kind}/"
    rows = {tag.removeprefix(prefix): points for tag, points in series.items() if tag.startswith(prefix)}
    last = max((points[-1][0] for points in rows.values()), default=0)
    for row in sorted(rows):
        if rows[row][-1][0] == last:
            yield row, rows[row]


def _depths(series: Series) -> list[tuple[int, Sequence[Point]]]:
    return sorted(
        (int(found[1]), points)
        for tag, points in series.items()
        if (found := re.fullmatch(r"mtp_(\d+) loss", tag))
    )


def _at_least(count: int, expected: float) -> float:
    """Upper bound of a Poisson variable's chance to be at least `count`."""
    if count <= expected:
        return 1.0
    first = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1)) if expected > 0 else 0.0
    return min(1.0, first / (1 - expected / (count + 1)))


def _base(points: Sequence[Point], least: int = LEAST_BASE) -> float | None:
    """The median of what came before the last `RECENT` points; None if that is too little."""
    before = [value for _, value in points[-BASE - RECENT : -RECENT]]
    return statistics.median(before) if len(before) >= least else None


def _running_median(points: Sequence[Point]) -> list[float]:
    values = [value for _, value in points]
    return [statistics.median(values[i : i + SMOOTH]) for i in range(len(values) - SMOOTH + 1)]


def _point_noise(points: Sequence[Point]) -> float:
    """Standard deviation of a point, from differences of neighbors, which excludes trends and outliers."""
    steps = [abs(after - before) for (_, before), (_, after) in zip(points, points[1:])]
    # 1.4826 is the ratio of a normal distribution's standard deviation to the median of |x|.
    return 1.4826 * statistics.median(steps) / math.sqrt(2)
