"""Sets of rows as sorted, disjoint intervals. The place of a row in a set is the number of rows before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

#: ((start, stop), …), start < stop, sorted, with gaps between.
Intervals = tuple[tuple[int, int], ...]


def whole(rows: int) -> Intervals:
    """The rows 0 to `rows` - 1."""
    return ((0, rows),) if rows else ()


def count(rows: Intervals) -> int:
    """Number of rows."""
    return sum(stop - start for start, stop in rows)


def union(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """Union of intervals in any order; empty ones are dropped."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(pieces):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def at_places(first: int, last: int, within: Intervals) -> Intervals:
    """Rows of the set `within` at places [first, last); places beyond its end are ignored."""
    found: list[tuple[int, int]] = []
    before = 0
    for start, stop in within:
        a, b = max(first - before, 0), min(last - before, stop - start)
        if a < b:
            found.append((start + a, start + b))
        before += stop - start
        if before >= last:
            break
    return tuple(found)


def parts(rows: Intervals, number: int) -> tuple[Intervals, ...]:
    """Cut the set in order into `number` parts of ceil(rows / number) rows; the last have fewer or none."""
    size = -(-count(rows) // number)
    return tuple(at_places(i * size, (i + 1) * size, rows) for i in range(number))


class IntervalIndex:
    """Index of a set for many look-ups; the cost of `clip` depends on its result, not on the set."""

    def __init__(self, rows: Intervals) -> None:
        self._rows = rows
        self._starts = [start for start, _ in rows]
        self._before = list(accumulate((stop - start for start, stop in rows), initial=0))

    def clip(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Rows of the set in [first, last), as ascending intervals (place, start, stop)."""
        found: list[tuple[int, int, int]] = []
        i = max(bisect_right(self._starts, first) - 1, 0)
        while i < len(self._rows) and self._starts[i] < last:
            start, stop = self._rows[i]
            a, b = max(start, first), min(stop, last)
            if a < b:
                found.append((self._before[i] + a - start, a, b))
            i += 1
        return found
