"""One option from each group at the least loss within limits. Standard library only.

    choose([[Option(0.0, (8.0,)), Option(0.1, (4.0,))], …], limits=(20.0,))

This is the multiple-choice knapsack problem. Partial solutions, group by group, are dropped if the rest
cannot fit, if another one is at least as good in everything, or if the Lagrangian bound of what they can
become is above a solution that is known. None of this loses the optimum, whatever the multipliers are. Where
more than `MOST` partial solutions are left, those with the lowest bounds are kept, and the answer says how
far from the optimum it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import NamedTuple

#: Rounding of sums in another order, relative to a limit, and to the largest loss.
SLACK = 1e-9
#: Partial solutions that are kept after each group; a hundred groups take a minute.
MOST = 1000
#: Steps to improve the multipliers; idle ones after which they get shorter; how often a choice is repaired.
_STEPS, _IDLE, _REPAIR = 240, 6, 24
#: How many of the best are compared with a new one where there are several limits: dropping is optional.
_COMPARED = 8
#: Decimals of sums: the same options in another order are the same.
_DIGITS = 12


class Option(NamedTuple):
    """loss: 0 or more. costs: one for each limit, 0 or more."""

    loss: float
    costs: tuple[float, ...]


class Choice(NamedTuple):
    """numbers: of the option of each group. gap: the loss is at most this above the least possible; 0: it is
    the least."""

    numbers: tuple[int, ...]
    gap: float


class _Partial(NamedTuple):
    loss: float
    costs: tuple[float, ...]
    #: The bound of what it can become, less that of all choices.
    worse: float
    #: (chain of the groups before, number of the option), or None.
    chain: object


_Numbered = tuple[int, Option]


def choose(groups: Sequence[Sequence[Option]], limits: Sequence[float]) -> Choice | None:
    """Return the best choice of an option from each group, or None if none within the limits was found."""
    shares = [[_share(option, limits) for option in group] for group in groups]
    kept = [_undominated(group) for group in shares]
    least = _suffixes([[min(o.costs[c] for _, o in group) for c in range(len(limits))] for group in kept])
    if any(cost > 1 + SLACK for cost in least[0]):
        return None
    multipliers, bound, picked = _multipliers(kept, len(limits))
    known = sum(option.loss for _, option in picked) if picked else inf
    slack = SLACK * (1 + sum(max(option.loss for option in group) for group in shares))
    # A choice loses at least the bound, and for each option how much worse it is than the cheapest.
    room = known - bound + slack
    states, exact = [_Partial(0.0, (0.0,) * len(limits), 0.0, None)], True
    for number, group in enumerate(kept):
        cheapest, _ = _cheapest(group, multipliers)
        worse = sorted((o.loss + _weighted(multipliers, o.costs) - cheapest, i, o) for i, o in group)
        found = []
        for state in states:
            for more, index, option in worse:
                if state.worse + more > room:
                    break
                costs = tuple(round(a + b, _DIGITS) for a, b in zip(state.costs, option.costs, strict=True))
                if all(a + b <= 1 + SLACK for a, b in zip(costs, least[number + 1], strict=True)):
                    loss = round(state.loss + option.loss, _DIGITS)
                    found.append(_Partial(loss, costs, state.worse + more, (state.chain, index)))
        states = _best(found, len(limits))
        if len(states) > MOST:
            # Of equal bounds those that use the limits evenly: a limit left over, or used up early, is lost.
            done = (number + 1) / len(kept)
            even = [a - b + (1 - a) * done for a, b in zip(least[0], least[number + 1], strict=True)]
            states, exact = sorted(states, key=lambda state: _promise(state, room, even))[:MOST], False
    best = min(states, key=lambda state: (state.loss, state.costs), default=None)
    if best is not None and (not picked or best.loss <= known + slack):
        return Choice(_numbers(best.chain), 0.0 if exact else max(0.0, best.loss - bound))
    if picked:
        return Choice(tuple(index for index, _ in picked), 0.0 if exact else max(0.0, known - bound))
    return None


def _promise(state: _Partial, room: float, even: list[float]) -> float:
    """A number that is small for a partial choice that may become a good one."""
    uneven = sum(abs(cost - one) for cost, one in zip(state.costs, even, strict=True))
    return state.worse / room + uneven


def _share(option: Option, limits: Sequence[float]) -> Option:
    """The option with its costs as shares of the limits."""
    return Option(option.loss, tuple(c / limit for c, limit in zip(option.costs, limits, strict=True)))


def _undominated(group: Sequence[Option]) -> list[_Numbered]:
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


def _weighted(multipliers: Sequence[float], costs: Sequence[float]) -> float:
    return sum(m * c for m, c in zip(multipliers, costs, strict=True))


def _cheapest(group: list[_Numbered], multipliers: Sequence[float]) -> tuple[float, _Numbered]:
    """The least loss with weighted costs, and its option."""
    found = min(group, key=lambda pair: pair[1].loss + _weighted(multipliers, pair[1].costs))
    return found[1].loss + _weighted(multipliers, found[1].costs), found


def _multipliers(
    groups: list[list[_Numbered]], limits: int
) -> tuple[list[float], float, list[_Numbered] | None]:
    """Multipliers of the limits by Polyak's subgradient steps, their bound, and the best choice met that
    fits."""
    multipliers, bound = [0.0] * limits, -inf
    known, kept = _repaired(groups, [min(group, key=lambda pair: sum(pair[1].costs)) for group in groups])
    chosen, pace, idle = list(multipliers), 1.0, 0
    for step in range(_STEPS if limits else 1):
        cheapest = [_cheapest(group, multipliers) for group in groups]
        value = sum(loss for loss, _ in cheapest) - sum(multipliers)
        slope = [sum(pair[1].costs[c] for _, pair in cheapest) - 1 for c in range(limits)]
        if value > bound:
            chosen, bound, idle = list(multipliers), value, 0
        else:
            idle += 1
            pace = pace / 2 if idle % _IDLE == 0 else pace
        if step % _REPAIR == 0 or all(s <= 0 for s in slope):
            loss, picked = _repaired(groups, [pair for _, pair in cheapest])
            if loss < known:
                known, kept = loss, picked
        square = sum(s * s for s in slope)
        if square == 0 or bound >= known:
            break
        # Without a choice that fits, any value above the bound will do as the aim.
        aim = known if known < inf else value + max(abs(value), 1e-3)
        multipliers = [
            max(0.0, m + pace * (aim - value) / square * s) for m, s in zip(multipliers, slope, strict=True)
        ]
    return chosen, bound, kept if known < inf else None


def _repaired(groups: list[list[_Numbered]], picked: list[_Numbered]) -> tuple[float, list[_Numbered]]:
    """A choice made to fit by single exchanges, and made better as far as it still fits; inf: it does not."""
    sums = [sum(column) for column in zip(*(option.costs for _, option in picked), strict=True)]

    def exchanges(excess: float) -> Iterator[tuple[float, int, _Numbered, list[float]]]:
        for number, group in enumerate(groups):
            own = picked[number][1]
            for pair in group:
                after = [s + b - a for s, a, b in zip(sums, own.costs, pair[1].costs, strict=True)]
                gain, lost = excess - _excess(after), pair[1].loss - own.loss
                if excess and gain > 0 or not excess and gain == 0 and lost < 0:
                    yield lost / (gain or 1), number, pair, after

    for _ in range(4 * len(groups)):
        best = min(exchanges(_excess(sums)), key=itemgetter(0), default=None)
        if best is None:
            break
        _, number, picked[number], sums = best
    fits = all(s <= 1 + SLACK for s in sums)
    return (sum(option.loss for _, option in picked) if fits else inf), picked


def _excess(sums: Sequence[float]) -> float:
    return sum(max(0.0, s - 1) for s in sums)


def _best(found: list[_Partial], limits: int) -> list[_Partial]:
    """The states without (most of) those that another one is at least as good as in everything."""
    kept: list[_Partial] = []
    compared = 1 if limits <= 1 else _COMPARED  # with one limit the last has the least loss
    for state in sorted(found, key=lambda state: (state.costs, state.loss)):
        if not any(
            other.loss <= state.loss and all(a <= b for a, b in zip(other.costs, state.costs, strict=True))
            for other in kept[-compared:]
        ):
            kept.append(state)
    return kept


def _numbers(chain: object) -> tuple[int, ...]:
    found: list[int] = []
    while isinstance(chain, tuple):
        chain, index = chain
        found.append(index)
    return tuple(reversed(found))
