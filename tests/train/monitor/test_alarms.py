"""The warnings: on series shaped like the Ultra report's figures, and silent on healthy noisy ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from megatron_nemotron3.train.monitor.alarms import RULES, Watchdog, scan
from megatron_nemotron3.train.monitor.signs import (
    SMOOTH,
    THRESHOLDS,
    WINDOW,
    mtp_loss_rise,
    router_outlier,
)

Shape = Callable[[float], float]
POINTS, LAYERS = 300, 8
#: MaxVio of a healthy run at the end of its figure: first layer, all others (Ultra report).
FIRST, MEDIAN = 4.8, 1.2


def history(
    seed: int,
    first: Shape,
    mtp: tuple[Shape, ...],
    points: int = POINTS,
    noise: float = 0.15,
    batch_noise: float = 0.02,
    depth_noise: float = 0.004,
) -> dict[str, list[tuple[int, float]]]:
    """A run of `points` measurements, 10 iterations apart; shapes are functions of progress 0 … 1.

    MaxVio is at least 1 and its excess has lognormal noise. All losses share the noise of the batch.
    """
    chance = random.Random(seed)
    series: dict[str, list[tuple[int, float]]] = {}
    for i in range(points):
        x, iteration = i / (points - 1), 10 * (i + 1)
        for layer in range(LAYERS):
            level = first(x) if layer == 0 else MEDIAN + 0.1 * (layer % 3)
            value = 1 + (level - 1) * math.exp(chance.gauss(0, noise))
            series.setdefault(f"max_vio/layer_{2 * layer + 2:03d}", []).append((iteration, value))
        batch = math.exp(chance.gauss(0, batch_noise))
        for depth, shape in enumerate(mtp, 1):
            value = shape(x) * batch * math.exp(chance.gauss(0, depth_noise))
            series.setdefault(f"mtp_{depth} loss", []).append((iteration, value))
    return series


def healthy_loss(depth: int) -> Shape:
    """Falls from log V fast, then slowly; deeper is harder, which shows only once something is learned."""
    return lambda x: 1.8 + 0.25 * depth + (11.8 - 1.8 - 0.25 * depth) * math.exp(-12 * x) - 0.1 * x


def flat(level: float) -> Shape:
    return lambda x: level


def stops_at(x0: float, before: Shape, slope: float) -> Shape:
    """`before` until progress x0, then a rise that reaches `slope` at the end."""
    return lambda x: before(x) + slope * max(0.0, x - x0) / (1 - x0)


HEALTHY = (healthy_loss(1), healthy_loss(2))


def test_ultras_second_divergence() -> None:
    """MaxVio of the first MoE layer 4.8 -> 12, the median at 1.2: said once, before it is at 12."""
    series = history(0, stops_at(0.5, flat(FIRST), 12 - FIRST), HEALTHY)
    (finding,) = scan(series)
    assert finding.rule == "router_outlier"
    begin, end = 10 * POINTS * 0.5, 10 * POINTS
    assert begin < finding.iteration < begin + 0.8 * (end - begin)
    assert "layer 2 is " in finding.message and "4.8 to 12" in finding.message
    assert f"({series['max_vio/layer_002'][-1][1]:.1f}" not in finding.message  # not the end: the moment


def test_ultras_first_divergence() -> None:
    """The loss of MTP depth 2 rises, depth 1's does not."""
    rising = stops_at(0.7, HEALTHY[1], 0.6)
    (finding,) = scan(history(1, flat(FIRST), (HEALTHY[0], rising)))
    assert finding.rule == "mtp_loss_rise" and finding.iteration > 0.7 * 10 * POINTS
    assert "MTP depth 2 rose by" in finding.message and "--grad-reduce-in-bf16" in finding.message


def test_one_mtp_depth_alone() -> None:
    assert [f.rule for f in scan(history(3, flat(2), (stops_at(0.7, HEALTHY[0], 0.8),)))] == ["mtp_loss_rise"]


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 334), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("first_layer", [MEDIAN, 2.0, FIRST])
def test_no_false_alarm(first_layer: float, seeds: range) -> None:
    """1,000 healthy runs, 90 if not full: three levels of the first layer, several lengths and noises."""
    for seed in seeds:
        chance = random.Random(1000 + seed)
        series = history(
            seed,
            flat(first_layer),
            HEALTHY if seed % 3 else HEALTHY[:1],
            points=chance.choice((60, 90, 150)),
            noise=chance.uniform(0.05, 0.25),
            batch_noise=chance.uniform(0.002, 0.05),
            depth_noise=chance.uniform(0.001, 0.01),
        )
        assert scan(series) == [], seed


def test_new_data_moves_all_depths_and_is_no_finding() -> None:
    """A step in the loss, as at a change of the data blend, is as high in both depths."""

    def step(depth: int) -> Shape:
        return lambda x: healthy_loss(depth)(x) + (0.4 if x > 0.6 else 0.0)

    assert scan(history(4, flat(FIRST), (step(1), step(2)))) == []


def test_one_bad_measurement_is_no_finding() -> None:
    series = history(5, flat(2.0), HEALTHY)
    at = POINTS // 2
    series["max_vio/layer_002"][at] = (10 * (at + 1), 23.0)
    series["mtp_2 loss"][at] = (10 * (at + 1), 9.0)
    assert scan(series) == []


def test_too_little_to_say() -> None:
    """Fewer layers, or points, than the table asks for."""
    series = history(6, flat(12.0), (healthy_loss(1), stops_at(0.5, healthy_loss(2), 5.0)), points=30)
    few_layers = {t: p for t, p in series.items() if t in [f"max_vio/layer_{n:03d}" for n in (2, 4, 6)]}
    assert len(few_layers) == THRESHOLDS["min_moe_layers"] - 1
    assert not router_outlier(few_layers)
    assert not router_outlier({t: p[: SMOOTH - 1] for t, p in series.items()})
    assert list(router_outlier(series)) == ["layer_002"]
    assert not mtp_loss_rise(series) and len(series["mtp_2 loss"]) < THRESHOLDS["mtp_history"]
    assert not any(rule.find({}) for rule in RULES)


def test_the_mtp_rows_of_the_router_are_not_compared_with_the_decoder() -> None:
    series = {t.replace("layer_002", "mtp_1_layer_2"): p for t, p in history(7, flat(12.0), ()).items()}
    assert not router_outlier(series)


def bounded(bounds: list[float], values: list[float]) -> dict[str, list[tuple[int, float]]]:
    """Layers of 64 experts with a MaxVio each, and its largest possible value."""
    rows = [f"layer_{n:03d}" for n in range(1, len(bounds) + 1)]
    found = {"monitor/experts": [(10 * SMOOTH, 64.0)]}
    for row, bound, value in zip(rows, bounds, values, strict=True):
        found[f"monitor/top_k/{row}"] = [(10 * SMOOTH, 64 / bound)]
        found[f"max_vio/{row}"] = [(10 * (i + 1), value) for i in range(SMOOTH)]
    return found


def test_layers_are_compared_on_the_scale_of_their_bounds() -> None:
    """A layer with few experts per token can have a far larger MaxVio than one with many."""
    usual = [16.0] * 4
    # 7.5 of 64 is as far from balance as 2.5 of 16, and 4.7 of 5.3 as 13.8 of 16.
    assert not router_outlier(bounded([*usual, 64.0], [1.2] * 4 + [7.5]))
    (row, sign), *more = router_outlier(bounded([*usual, 16 / 3], [1.2] * 4 + [4.7])).items()
    assert (row, sign.firm, more) == ("layer_005", True, [])
    assert (
        "is 4.7 (4.7 at iteration 10) of 5.3; 13.8 of 16.0 is 11.5 times the median layer's 1.2" in sign.text
    )
    # Balanced layers are alike whatever their bounds; with one bound nothing is scaled.
    assert not router_outlier(bounded([2.0, 4.0, 16.0, 64.0], [1.0] * 4))
    (sign,) = router_outlier(bounded([16.0] * 5, [1.2] * 4 + [7.5])).values()
    assert sign.size == 7.5 and "7.5 (7.5 at iteration 10), 6.2 times" in sign.text


def test_memory_is_bounded() -> None:
    dog = Watchdog()
    for i in range(3 * WINDOW):
        dog.add(i, {"max_vio/layer_001": 1.0, "mtp_1 loss": 2.0, "latent_rms/layer_001": 1.0})
    assert {tag: len(points) for tag, points in dog.series.items()} == {
        "max_vio/layer_001": WINDOW,
        "mtp_1 loss": WINDOW,
    }


def routers(
    iterations: range, share: Callable[[int], float], dead: float = 0.0, tokens: float = 1e6
) -> dict[str, list[tuple[int, float]]]:
    """Two routers of 64 experts, top 4: one balanced, one at a share of the way to the bound of 16."""
    numbers = {"experts": 64.0, "top_k": 4.0, "bias_update_rate": 1e-3, "interval_tokens": tokens}
    series = {f"monitor/{name}": [(i, value) for i in iterations] for name, value in numbers.items()}
    for kind in ("max_vio", "max_vio_interval"):
        series[f"{kind}/layer_002"] = [(i, 1.2) for i in iterations]
        series[f"{kind}/layer_004"] = [(i, 1 + 15 * share(i)) for i in iterations]
    series["dead_experts_interval/layer_004"] = [(i, dead) for i in iterations]
    return series


@pytest.mark.parametrize(
    ("iterations", "share", "found"),
    [
        # The early phase ends after 1 / update rate: 1,000 iterations.
        pytest.param(range(10, 3000, 10), lambda i: 1.0 if i > 20 else 0.1, [1010], id="never balances"),
        pytest.param(
            range(10, 500, 10),
            lambda i: 1.0 if 20 < i < 60 or i > 300 else 0.1,
            [320],
            id="had settled",
        ),
        pytest.param(range(5000, 5200, 10), lambda i: 1.0, [5010], id="resumed"),
        # A value that moves around the threshold, here 0.9, is not over before it is well below.
        pytest.param(
            range(2000, 12_000, 10), lambda i: 0.92 if i // 10 % 8 < 3 else 0.85, [2010], id="trembles"
        ),
    ],
)
def test_when_a_router_is_reported(iterations: range, share: Shape, found: list[int]) -> None:
    findings = scan(routers(iterations, share))
    assert [finding.iteration for finding in findings] == found
    assert findings[0].rule == "router_collapse" and findings[0].rows == ("layer_004",)


def test_each_router_is_judged_by_its_own_number_of_experts() -> None:
    """MaxVio of 1.95 is next to nothing of the bound 64 / 4, and nearly all of 64 / 32."""
    series = routers(range(5000, 5200, 10), lambda i: 0.1)
    iterations = [i for i, _ in series.pop("monitor/top_k")]
    for row, topk in (("layer_002", 4.0), ("layer_004", 32.0)):
        series[f"monitor/top_k/{row}"] = [(i, topk) for i in iterations]
        for kind in ("max_vio", "max_vio_interval"):
            series[f"{kind}/{row}"] = [(i, 1.95) for i in iterations]
    (finding,) = scan(series)
    assert (finding.rule, finding.rows) == ("router_collapse", ("layer_004",))
    assert "2.00 is the most possible" in finding.message


def test_a_fault_that_comes_and_goes_is_reported_ever_more_rarely() -> None:
    found = scan(routers(range(2000, 12_000, 10), lambda i: 1.0 if i // 10 % 12 < 5 else 0.1))
    assert 3 <= len(found) <= 6 and {finding.rule for finding in found} == {"router_collapse"}
    waits = [after.iteration - before.iteration for before, after in zip(found, found[1:])]
    assert waits == sorted(waits)


@pytest.mark.parametrize(
    ("dead", "tokens", "found"),
    [(24, 1e6, 1), (1, 1e6, 1), (24, 1280, 1), (3, 1280, 0), (60, 60, 0), (0, 1e6, 0)],
)
def test_idle_experts_of_a_small_sample_are_chance(dead: float, tokens: float, found: int) -> None:
    """Of 60 tokens even balance leaves most experts out. A single one counts if it stays idle."""
    findings = scan(routers(range(2000, 2300, 10), lambda i: 0.1, dead, tokens))
    assert [finding.rule for finding in findings] == ["dead_experts"] * found


def test_a_frozen_layer_is_no_finding() -> None:
    """It has no gradients to count: 0 of 0."""
    series = {"max_vio/layer_002": [(i, 1.2) for i in range(10)]}
    assert scan(series | {"zero_gradients/layer_001": [(i, math.nan) for i in range(10)]}) == []
    assert len(scan(series | {"zero_gradients/layer_001": [(i, 1.0) for i in range(10)]})) == 1


def test_rules_whose_sign_lasts_one_measurement_wait_for_none() -> None:
    """The bias update has an exact bound, so one measurement beyond it is enough; at it, none is."""
    series = routers(range(2000, 2300, 10), lambda i: 0.1)
    for speed, found in ((2e-3, 0), (2.2e-3, 1)):
        series["expert_bias_spread/layer_004"] = [(i, speed * (i - 2000)) for i in range(2000, 2300, 10)]
        findings = scan(series)
        assert [finding.iteration for finding in findings if finding.rule == "bias_drift"] == [2010] * found
