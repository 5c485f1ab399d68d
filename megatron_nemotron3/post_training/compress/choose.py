"""One option from each group at little loss within limits, by beam search.

    choose([[Option(0.0, (8.0,)), Option(0.1, (4.0,))], …], limits=(20.0,))

This is the multiple-choice knapsack problem. Partial choices grow group by group. Those that the rest cannot
fit are dropped. Where more than `MOST` are left, those with the least loss are kept. What they cost counts as
loss: with a price for each limit, at which the cheapest options of all groups together just fit. With up to
`MOST` partial choices the answer is the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

#: Rounding of sums in another order, relative to a limit.
SLACK = 1e-9
#: Partial choices that are kept after each group; a hundred groups take a minute.
MOST = 1024
#: Steps to find the prices.
_STEPS = 100
#: Weight of an uneven use of the limits, as a share of the largest loss.
_EVEN = 0.01
#: Decimals of sums: the same options in another order are the same.
_DIGITS = 12


class Option(NamedTuple):
    """loss: 0 or more. costs: one for each limit, 0 or more."""

    loss: float
    costs: tuple[float, ...]


_Numbered = tuple[int, Option]
#: Loss and costs of a partial choice -> the numbers of its options.
_Partials = dict[Option, tuple[int, ...]]


def choose(
    groups: Sequence[Sequence[Option]],
    limits: Sequence[float],
    report: Callable[[float], object] = lambda done: None,
) -> tuple[int, ...] | None:
    """Return the number of the option of each group, or None if no choice within the limits was found.

    Args:
        report: called with the share of the groups that is done.
    """
    kept = [_undominated(_share(option, limits) for option in group) for group in groups]
    least = _suffixes([[min(o.costs[c] for _, o in group) for c in range(len(limits))] for group in kept])
    most_loss = sum(max(option.loss for _, option in group) for group in kept)
    prices = _prices(kept, len(limits), most_loss)
    partials: _Partials = {Option(0.0, (0.0,) * len(limits)): ()}
    for number, group in enumerate(kept):
        room = [1 + SLACK - cost for cost in least[number + 1]]
        grown: _Partials = {}
        for (loss, costs), numbers in partials.items():
            for index, option in group:
                after = tuple(round(a + b, _DIGITS) for a, b in zip(costs, option.costs, strict=True))
                if all(a <= b for a, b in zip(after, room, strict=True)):
                    grown.setdefault(Option(round(loss + option.loss, _DIGITS), after), (*numbers, index))
        partials = grown
        done = (number + 1) / len(kept)
        if len(grown) > MOST:
            # Of equal ones those that use the limits evenly: a limit left over, or used up early, is lost.
            even = [a - b + (1 - a) * done for a, b in zip(least[0], least[number + 1], strict=True)]
            best = nsmallest(MOST, grown, key=lambda one: _priority(one, prices, even, _EVEN * most_loss))
            partials = {one: grown[one] for one in best}
        report(done)
    return partials[min(partials)] if partials else None


def _priority(partial: Option, prices: Sequence[float], even: Sequence[float], weight: float) -> float:
    """A number that is small for a partial choice that may become a good one."""
    uneven = sum(abs(cost - one) for cost, one in zip(partial.costs, even, strict=True))
    return partial.loss + _weighted(prices, partial.costs) + weight * uneven


def _share(option: Option, limits: Sequence[float]) -> Option:
    return Option(option.loss, tuple(c / limit for c, limit in zip(option.costs, limits, strict=True)))


def _undominated(group: Iterable[Option]) -> list[_Numbered]:
    """The options, with their numbers, that no other is at least as good as in everything."""
    kept: list[_Numbered] = []
    for index, option in sorted(enumerate(group), key=lambda pair: (pair[1], pair[0])):
        if not any(all(a <= b for a, b in zip(o.costs, option.costs, strict=True)) for _, o in kept):
            kept.append((index, option))
    return kept


def _suffixes(rows: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Sums of the rows from each one on; the last is zero."""
    columns = [[*accumulate(reversed(column), initial=0.0)][::-1] for column in zip(*rows, strict=True)]
    return list(zip(*columns, strict=True)) if columns else [()] * (len(rows) + 1)


def _weighted(prices: Sequence[float], costs: Sequence[float]) -> float:
    return sum(m * c for m, c in zip(prices, costs, strict=True))


def _prices(groups: list[list[_Numbered]], limits: int, most_loss: float) -> list[float]:
    """Prices of the limits, by subgradient steps that get shorter."""
    prices = [0.0] * limits
    for step in range(1, _STEPS + 1):
        picked = [min((o for _, o in g), key=lambda o: o.loss + _weighted(prices, o.costs)) for g in groups]
        over = [sum(option.costs[c] for option in picked) - 1 for c in range(limits)]
        prices = [max(0.0, price + most_loss / step * one) for price, one in zip(prices, over, strict=True)]
    return prices
