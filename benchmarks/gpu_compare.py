"""How far two sides of a training step are apart, from sketches in results (gpu_weights.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gpu_results import Record

EPS = 2.0**-7
#: Of two sides in BF16. The root mean square error of one rounding is 0.21 eps (eps / sqrt(12) where the
#: significand is 1, half of it just below 2). A layer rounds about 9 times between its input and the residual
#: stream, and squares of independent errors add: for 12 layers 0.21 eps * sqrt(9 * 12) = 2.2 eps per side,
#: 3.1 eps between two.
LOGITS = 4 * EPS
#: Gradients read the roundings of forward and add as many; a single one may be a sum with cancellation, such
#: as those of A_log and dt_bias (tests/gpu/test_model.py). Median and worst of all tensors.
GRADIENTS = (2**0.5 * 5 * EPS, 2**0.5 * 20 * EPS)


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """|difference| / |expected| of two sketches."""
    norm = math.sqrt(sum(x * x for x in expected))
    return (
        math.sqrt(sum((a - b) ** 2 for a, b in zip(found, expected, strict=True))) / norm
        if norm
        else math.inf
    )


def differences(found: Record, expected: Record) -> tuple[float, float, float, str]:
    """Of logits, the median and the largest of the gradients, and whose it is."""
    names = found["gradients"].keys() & expected["gradients"].keys()
    missing = found["gradients"].keys() ^ expected["gradients"].keys()
    logits = distance(found["logits"], expected["logits"])
    if missing or not names:
        return (
            logits,
            math.inf,
            math.inf,
            f"{len(missing)} gradients of one side only: {min(missing, default='')}",
        )
    each = {n: distance(found["gradients"][n], expected["gradients"][n]) for n in names}
    # nan is larger than every number here
    worst = max(each, key=lambda n: math.inf if math.isnan(each[n]) else each[n])
    return logits, statistics.median(each.values()), each[worst], worst


def agrees(logits: float, median: float, worst: float) -> bool:
    """Whether two sides in BF16 may differ so; never with nan."""
    return logits <= LOGITS and median <= GRADIENTS[0] and worst <= GRADIENTS[1]
