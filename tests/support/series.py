"""Series as the monitors write them: recorded from healthy runs, and drawn at Super's size from these."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from megatron_nemotron3.models import get
from megatron_nemotron3.models.series import decoder_row, is_decoder

#: Tag -> points (iteration, value).
History = dict[str, list[tuple[int, float]]]

FILE = Path(__file__).parent.parent / "golden" / "healthy_runs.npz"
#: Seed of the recorded runs on which thresholds were set.
SET_ON = 1
#: Iterations from one recorded measurement to the next.
INTERVAL = 10


@functools.cache
def recorded() -> dict[str, History]:
    """The healthy runs of tests/golden/healthy_runs.npz, from step 10 on: name_seed -> series."""
    with np.load(FILE) as file:
        names = sorted(key.removesuffix("/tags") for key in file if key.endswith("/tags"))
        found = {}
        for name in names:
            iterations = file[f"{name}/iterations"].tolist()
            rows = zip(file[f"{name}/tags"].tolist(), file[f"{name}/values"].tolist(), strict=True)
            found[name] = {
                tag: [(i, v) for i, v in zip(iterations, values, strict=True) if i % INTERVAL == 0]
                for tag, values in rows
            }
    return found


def super_like(seed: int) -> History:
    """A healthy run of Super's size: 88 layers, 40 of them MoE with 512 experts and top 22, two MTP depths.

    Every layer takes the course of one drawn at random from the recorded runs of `seed`'s parity, with
    lognormal noise of 5 %: of MaxVio its share of the way to the bound, of idle experts their share, of the
    residual stream its growth since the start, on top of a growth over depth of 3 orders of magnitude
    (Super's, as published); biases, zero gradients and losses as they are. Tokens are Super's, 3,072
    sequences of 8,192 per step. Idle experts come from the runs with few experts, until a layer first had
    none for five measurements: later single ones are the small sample of 20 sequences in an interval.
    """
    chance = random.Random(seed)
    runs = [run for name, run in recorded().items() if int(name[-1]) % 2 == seed % 2]
    few = [run for run in runs if run["monitor/experts"][0][1] <= 32]
    config = get("super")
    assert config.num_moe_experts and config.moe_router_topk
    experts, topk = config.num_moe_experts, config.moe_router_topk
    source = next(run for run in runs if "mtp_2 loss" in run)
    steps = [i for i, _ in source["monitor/lm_loss"]]
    found: History = {tag: source[tag] for tag in ("monitor/lm_loss", "mtp_1 loss", "mtp_2 loss")}

    def put(tag: str, values: Iterable[float]) -> None:
        found[tag] = list(zip(steps, values, strict=True))

    def noise() -> float:
        return math.exp(chance.gauss(0, 0.05))

    depth = len(config.pattern)
    for number, kind in enumerate(config.pattern, 1):
        row = decoder_row(number)
        run = chance.choice(runs)
        like = chance.choice(
            [t for t in run if t.startswith("residual_rms/") and is_decoder(t.split("/")[1])]
        )
        begun = run[like][0][1]
        level = 10 ** (3 * number / depth)
        put(f"residual_rms/{row}", (level * value / begun * noise() for _, value in run[like]))
        if kind != "E":
            put(f"zero_gradients/{row}", (0.0 for _ in steps))
            continue
        run, other = chance.choice(runs), chance.choice(few)
        like = chance.choice([t.split("/")[1] for t in run if t.startswith("max_vio_interval/layer")])
        bound = run["monitor/experts"][0][1] / run["monitor/top_k"][0][1]
        for tag in ("max_vio", "max_vio_interval"):
            put(
                f"{tag}/{row}",
                (
                    1 + min(1.0, (value - 1) / (bound - 1) * noise()) * (experts / topk - 1)
                    for _, value in run[f"{tag}/{like}"]
                ),
            )
        for tag in ("expert_bias_spread", "expert_bias_mean", "zero_gradients"):
            put(f"{tag}/{row}", (value for _, value in run[f"{tag}/{like}"]))
        like = chance.choice([t for t in other if t.startswith("dead_experts_interval/layer")])
        share = experts / other["monitor/experts"][0][1]
        young = _until_quiet([value for _, value in other[like]])
        put(f"dead_experts_interval/{row}", (round(share * value) for value in young))
    first, last = (dict(found[f"residual_rms/{decoder_row(n)}"]) for n in (1, depth))
    put("monitor/residual_rms_last_over_first", (last[i] / first[i] for i in steps))
    numbers = {"experts": experts, "top_k": topk, "bias_update_rate": 1e-3}
    for name, value in numbers.items():
        put(f"monitor/{name}", (float(value) for _ in steps))
    put("monitor/interval_tokens", (3072.0 * 8192 * INTERVAL for _ in steps))
    return found


def _until_quiet(values: list[float], measurements: int = 5) -> list[float]:
    """The values up to the first `measurements` zeros in a row after one that is not zero, then zeros."""
    seen = quiet = 0
    for i, value in enumerate(values):
        seen, quiet = seen + (value > 0), 0 if value else quiet + 1
        if seen and quiet == measurements:
            return [*values[: i + 1], *[0.0] * (len(values) - i - 1)]
    return values


def hurt(history: History, begin: int, tags: Iterable[str], fault: Callable[[int, float], float]) -> History:
    """`history` with other values of `tags` after iteration `begin`: `fault(iterations since, value)`."""
    changed = set(tags)
    return {
        tag: [(i, fault(i - begin, v) if i > begin else v) for i, v in points] if tag in changed else points
        for tag, points in history.items()
    }
