"""The smaller forms of a model that meet a budget of parameters, memory or latency and lose least.

A candidate is one value for each size that varies. The width and the top-k of the experts are chosen for each
E layer by itself, all other sizes once for the model. What a candidate costs is a sum over its layers, and so
is what it loses, so for every combination of the model's sizes a beam search (`choose`) finds the experts of
each layer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.launch.plan.serving import ServingUse, serving_bytes, step_seconds
from megatron_nemotron3.models import Nemotron3Config, count
from megatron_nemotron3.post_training.compress.choose import SLACK, Option, choose
from megatron_nemotron3.post_training.compress.sizes import (
    BY_LAYER,
    DIMENSIONS,
    Size,
    candidate_config,
    require_known,
)

#: Combinations of the sizes of the model; each takes some seconds where many layers have many values.
MOST_COMBINATIONS = 2000
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


class CandidateLosses(Protocol):
    """What a candidate loses, as a sum: 0 for the model itself."""

    def layers(self, number: int) -> Sequence[int]:
        """Return the decoder layers that stay if so many do."""

    def experts(self, layer: int, width: int, topk: int) -> float:
        """Return the loss of an E layer by the width and the number per token of its experts."""

    def rest(self, config: Nemotron3Config, layers: Sequence[int]) -> float:
        """Return the loss by all other sizes of a candidate, whose decoder has these layers of the model."""


@dataclass(frozen=True)
class UniformLosses:
    """Losses without measurements: every channel, head, expert, place in the top-k and layer counts alike."""

    config: Nemotron3Config

    def layers(self, number: int) -> Sequence[int]:
        """Keep layers at equal distances, of any kind."""
        return [i * self.config.num_layers // number for i in range(number)]

    def experts(self, layer: int, width: int, topk: int) -> float:
        own = self.config.at(layer)
        return 2.0 - width / (own.moe_ffn_hidden_size or 1) - topk / (own.moe_router_topk or 1)

    def rest(self, config: Nemotron3Config, layers: Sequence[int]) -> float:
        lost = float(self.config.num_layers - len(layers))
        for name, kinds in DIMENSIONS.items():
            old, new = getattr(self.config, name), getattr(config, name)
            if name not in ("num_layers", *BY_LAYER) and old != new:
                lost += (1 - new / old) * sum(kind in kinds for kind in config.pattern)
        return lost


@dataclass(frozen=True)
class SmallerModel:
    """A model, what it costs by `MEASURES`, and what it loses.

    sizes, layers: as for `candidate_config`; layers is None if all stay.
    """

    config: Nemotron3Config
    sizes: Mapping[str, Size]
    layers: tuple[int, ...] | None
    loss: float
    costs: Mapping[str, float]


@dataclass(frozen=True)
class SearchResult:
    """candidates: that with the least loss first. skipped: combinations of sizes that no model can have; why:
    the reason of the first."""

    candidates: tuple[SmallerModel, ...]
    skipped: int
    why: str


class NoCandidate(ValueError):
    """No candidate meets the budget; `nearest` exceeds it least."""

    def __init__(self, nearest: SmallerModel, budget: Mapping[str, float]) -> None:
        over = [
            f"{name}={amount(name, nearest.costs[name])} instead of {amount(name, limit)}"
            for name, limit in budget.items()
            if not fits(nearest.costs[name], limit)
        ]
        super().__init__(
            f"no candidate meets the budget: the nearest, {sizes_text(nearest)}, has {' and '.join(over)}: "
            "raise the budget to that, or let sizes vary to smaller values"
        )
        self.nearest = nearest


def search(
    config: Nemotron3Config,
    values: Mapping[str, Sequence[int]],
    budget: Mapping[str, float],
    serving: ServingUse,
    losses: CandidateLosses | None = None,
) -> SearchResult:
    """Return the candidates that meet the budget: of each combination of the model's sizes the best that
    is found, and the best whose E layers are alike.

    Args:
        values: name of `DIMENSIONS` -> values to choose from.
        budget: name of `MEASURES` -> limit, in elements, bytes or seconds.
        losses: None: `UniformLosses`.

    Raises:
        NoCandidate: none meets the budget.
        ValueError: an unknown name, a value that the model cannot have, or too many combinations.
    """
    losses = losses or UniformLosses(config)
    found: list[SmallerModel] = []
    nearest: list[SmallerModel] = []
    refused: list[ValueError] = []
    combinations = _combinations(values)
    each = 100 / len(combinations)
    with Bar("search", "%", 100) as bar:

        def after(number: int) -> Callable[[float], object]:
            """What shows the share of a combination that is done, after so many others."""
            return lambda done: bar.to(int(each * (number + done)))

        for number, sizes in enumerate(combinations):
            after(number)(0.0)
            try:
                space = _CandidateSpace(config, sizes, values, budget, serving, losses)
            except ValueError as problem:
                refused.append(problem)
                continue
            best = space.best(after(number))
            if best is None:
                nearest.append(space.smallest)
                continue
            found.append(best)
            alike = space.best_alike()
            if alike is not None and alike.config != best.config:
                found.append(alike)
    if not found and not nearest:
        raise refused[0]
    if not found:
        raise NoCandidate(min(nearest, key=lambda one: max(one.costs[n] / budget[n] for n in budget)), budget)
    return SearchResult(tuple(sorted(found, key=_order)), len(refused), str(refused[0]) if refused else "")


def _combinations(values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    for name in values:
        require_known(name)
    if "num_layers" in values and any(name in values for name in BY_LAYER):
        raise ValueError(
            f"num_layers and {' or '.join(BY_LAYER)}, which vary by layer: `nemotron3 prune` cuts the depth "
            "first, so search for the depth, and then for the experts of what is left"
        )
    whole = {name: given for name, given in values.items() if name not in BY_LAYER}
    if (number := math.prod(map(len, whole.values()))) > MOST_COMBINATIONS:
        raise ValueError(
            f"{number} combinations of {', '.join(whole)}: give fewer values, for {MOST_COMBINATIONS} at most"
        )
    return [dict(zip(whole, chosen, strict=True)) for chosen in itertools.product(*whole.values())]


_Row = tuple[int, int]


class _CandidateSpace:
    """The candidates of one combination of the model's sizes: those that differ in the rows of experts."""

    def __init__(
        self,
        model: Nemotron3Config,
        sizes: Mapping[str, int],
        values: Mapping[str, Sequence[int]],
        budget: Mapping[str, float],
        serving: ServingUse,
        losses: CandidateLosses,
    ) -> None:
        self.model, self.sizes, self.values = model, sizes, values
        self.budget, self.serving, self.losses = budget, serving, losses
        number = sizes.get("num_layers", model.num_layers)
        if not 0 < number <= model.num_layers:
            raise ValueError(f"num_layers={number}: {model.name} has {model.num_layers}, give 1 to that")
        every = number == model.num_layers
        self.layers = None if every else tuple(losses.layers(number))
        kept = range(number) if self.layers is None else self.layers
        varies = any(name in values for name in BY_LAYER)
        self.numbers = [layer for layer in kept if varies and model.pattern[layer] == "E"]
        self.rows = [self._rows(layer) for layer in self.numbers]
        #: No other candidate has less of any measure.
        self.least = [rows[0] for rows in self.rows]
        self.config = candidate_config(model, self._sizes(self.least), self.layers)
        self.rest = losses.rest(self.config, kept)
        self.smallest = self.candidate(self.least)
        self._changes: dict[tuple[_Row, _Row], tuple[float, ...]] = {}

    def _rows(self, layer: int) -> list[_Row]:
        """Width and top-k to choose from in a layer: given values up to its own, or its own."""
        own, columns = self.model.at(layer), []
        experts = self.sizes.get("num_moe_experts", own.num_moe_experts or 0)
        for name, most in zip(
            BY_LAYER, (own.moe_ffn_hidden_size or 0, own.moe_router_topk or 0), strict=True
        ):
            given = self.values.get(name, (most,))
            most = min(most, experts) if name == "moe_router_topk" else most
            if not (allowed := sorted(value for value in given if 0 < value <= most)):
                raise ValueError(
                    f"{name}={','.join(map(str, given))}: layer {layer} of {self.model.name} can have at "
                    f"most {most}: give a value up to that"
                )
            columns.append(allowed)
        return [(width, topk) for width in columns[0] for topk in columns[1]]

    def _sizes(self, rows: Sequence[_Row]) -> dict[str, Size]:
        by_layer = {
            name: tuple(row[column] for row in rows)
            for column, name in enumerate(BY_LAYER)
            if name in self.values and rows
        }
        return {**self.sizes, **by_layer}

    def candidate(self, rows: Sequence[_Row]) -> SmallerModel:
        sizes = self._sizes(rows)
        config = candidate_config(self.model, sizes, self.layers)
        lost = sum(self.losses.experts(layer, *row) for layer, row in zip(self.numbers, rows, strict=True))
        return SmallerModel(config, sizes, self.layers, self.rest + lost, costs(config, self.serving))

    def best(self, report: Callable[[float], object]) -> SmallerModel | None:
        if not self._fits(self.smallest):
            return None
        groups = [
            [Option(self.losses.experts(layer, *row), self._added(place, row)) for row in self.rows[place]]
            for place, layer in enumerate(self.numbers)
        ]
        limits = [limit - self.smallest.costs[name] for name, limit in self.budget.items()]
        # Without: nothing to choose, or only the smallest is left.
        picked = choose(groups, limits, report) if groups and min(limits, default=1.0) > 0 else None
        if picked is None:
            return self.smallest
        return self.candidate([rows[index] for rows, index in zip(self.rows, picked, strict=True)])

    def best_alike(self) -> SmallerModel | None:
        if not self.rows:
            return None

        def varied(row: _Row) -> tuple[int, ...]:  # a size that does not vary stays as it is in each layer
            return tuple(size for name, size in zip(BY_LAYER, row, strict=True) if name in self.values)

        by_layer = [{varied(row): row for row in rows} for rows in self.rows]
        common = sorted(set.intersection(*map(set, by_layer)))
        every = (self.candidate([rows[one] for rows in by_layer]) for one in common)
        return min(filter(self._fits, every), key=_order, default=None)

    def _fits(self, one: SmallerModel) -> bool:
        return all(fits(one.costs[name], limit) for name, limit in self.budget.items())

    def _added(self, place: int, row: _Row) -> tuple[float, ...]:
        """What the smallest candidate costs more, by each measure of the budget, with this row in a layer."""
        change = (self.least[place], row)
        if change not in self._changes:
            rows = [*self.least[:place], row, *self.least[place + 1 :]]
            config = candidate_config(self.model, self._sizes(rows), self.layers)
            more, base = costs(config, self.serving), self.smallest.costs
            self._changes[change] = tuple(more[name] - base[name] for name in self.budget)
        return self._changes[change]


def _order(one: SmallerModel) -> tuple[float, float]:
    return one.loss, one.costs["params"]


def sizes_text(one: SmallerModel) -> str:
    """Return the sizes of a candidate in a few words: "hidden_size 96, moe_router_topk 2 to 6"."""
    parts = []
    for name, size in one.sizes.items():
        low, high = (min(size), max(size)) if isinstance(size, tuple) else (size, size)
        parts.append(f"{name} {low:,}" + (f" to {high:,}" if high > low else ""))
    return ", ".join(parts)
