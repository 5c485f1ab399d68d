"""What a model costs, and how much it may: parameters, memory and latency."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.launch.plan.serving import ServingUse, serving_bytes, step_seconds
from megatron_nemotron3.models import Nemotron3Config, count
from megatron_nemotron3.post_training.compress.choose import SLACK

_NUMBERS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BYTES = {"": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
#: Measure -> units of an amount. Parameters are counted as `nemotron3 show` does: all that is stored, and
#: those that a token is multiplied with, embeddings among them. The others are those of
#: `launch.plan.serving`.
MEASURES: dict[str, dict[str, float]] = {
    "params": _NUMBERS,
    "active": _NUMBERS,
    "memory": _BYTES,
    "latency": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d{1,2})?)([A-Za-z]*)")


def costs(config: Nemotron3Config, serving: ServingUse) -> dict[str, float]:
    """Return what a model costs by each of `MEASURES`."""
    number = count(config)
    return {
        "params": number.stored,
        "active": number.active["with_embeddings"],
        "memory": serving_bytes(config, serving),
        "latency": step_seconds(config, serving),
    }


def fits(cost: float, limit: float) -> bool:
    """Whether a cost is within a limit, up to rounding."""
    return cost <= limit * (1 + SLACK)


def parse_budget(words: Sequence[str]) -> dict[str, float]:
    """Read "params=60B", "memory=80GiB", "latency=12ms"; the result is in elements, bytes or seconds."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, text = word.partition("=")
        amounts = _AMOUNT.fullmatch(text)
        if not equals or name not in MEASURES or amounts is None:
            near = "" if name in MEASURES else hint(name, list(MEASURES))
            raise ValueError(
                f"--budget {word}: give MEASURE=N of {', '.join(MEASURES)}, such as params=60B, memory=80GiB "
                f"or latency=12ms{near}"
            )
        units = MEASURES[name]
        if amounts[2] not in units:
            raise ValueError(f"--budget {word}: give {name} in {', '.join(filter(None, units))}")
        if name in found:
            raise ValueError(f"--budget {word}: {name} is given twice: drop one")
        found[name] = float(amounts[1]) * units[amounts[2]]
        if not 0 < found[name] < float("inf"):
            raise ValueError(f"--budget {word}: give a positive number")
    return found


def amount(name: str, value: float) -> str:
    """Return a cost in a unit that suits its measure, as `parse_budget` reads it."""
    if name == "latency":
        return f"{value * 1e3:.4g}ms"
    if name == "memory":
        return f"{value / 2**30:.4g}GiB" if value >= 2**30 else f"{value / 2**20:.4g}MiB"
    for prefix, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= unit:
            return f"{value / unit:.4g}{prefix}"
    return f"{value:.0f}"
