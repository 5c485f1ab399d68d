"""Which data lane owns which samples of a microbatch, and which rank of a lane owns which positions.

As in upstream's MIMO, rows are ordered by sample, then by position, and every lane has a contiguous share of
the samples. Whole samples are assigned, so the lane counts of two modules need not divide each other.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import IntervalIndex, Intervals
from megatron_nemotron3.boundary.layout import Layout

#: Positions of a sample's rows: (first position, number of rows), ascending. One run for each image or clip.
Runs = tuple[tuple[int, int], ...]


# A small cache: with documents an entry can hold a megabyte, and every microbatch is packed differently.
@functools.lru_cache(maxsize=64)
def positions(
    length: int, cp: int, tp: int, *, sequence_parallel: bool, documents: tuple[int, ...] = ()
) -> tuple[Intervals, ...]:
    """Positions of each rank of a lane, at index context_rank * tp + tensor_rank.

    Context parallelism cuts a sequence, or each document of a packed one, into 2 * cp chunks; context rank c
    has chunks c and 2 * cp - 1 - c. Sequence parallelism then cuts the rest into tp parts.
    Source: Megatron's `get_batch_on_this_cp_rank`, TransformerEngine's `thd_get_partitioned_indices`.
    """
    bounds = documents or (0, length)
    if bounds[0] != 0 or bounds[-1] != length or list(bounds) != sorted(bounds):
        raise ValueError(
            f"documents {bounds[:20]} do not cover a sequence of {length}: start at 0, ascend, and end there"
        )
    of_context: list[Intervals] = []
    for rank in range(cp):
        pieces: list[tuple[int, int]] = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            chunk, rest = divmod(stop - start, 2 * cp) if cp > 1 else (0, 0)
            if rest:
                raise ValueError(
                    f"a sequence of {stop - start} does not divide into 2 * CP = {2 * cp} chunks: pad it to "
                    f"a multiple of {2 * cp}"
                )
            for number in (rank, 2 * cp - 1 - rank) if cp > 1 else ():
                pieces.append((start + number * chunk, start + (number + 1) * chunk))
        of_context.append(intervals.union(pieces) if cp > 1 else intervals.whole(length))
    if not sequence_parallel:
        return tuple(rows for rows in of_context for _ in range(tp))
    if (length // cp) % tp:
        raise ValueError(
            f"{length // cp} positions of a context rank do not divide among TP={tp} for sequence "
            f"parallelism: pad the sequence to a multiple of {cp * tp * (2 if cp > 1 else 1)}"
        )
    return tuple(part for rows in of_context for part in intervals.parts(rows, tp))


def media_shares(media: Sequence[int], ranks: int) -> tuple[range, ...]:
    """Consecutive media for each context rank: the rank in whose equal part of the rows its middle lies."""
    total, before = max(sum(media), 1), 0
    owners: list[int] = []
    for rows in media:
        owners.append(min((2 * before + rows) * ranks // (2 * total), ranks - 1))
        before += rows
    starts = [bisect_left(owners, rank) for rank in range(ranks + 1)]
    return tuple(range(a, b) for a, b in zip(starts, starts[1:], strict=False))


def rows_held(media: Sequence[int], layout: Layout) -> tuple[Intervals, ...]:
    """Rows of a lane that each rank of a sending module holds, at index context_rank * tp + tensor_rank.

    media: rows of each medium, which is what the encoder attends over: a picture, a clip.
    """
    cp, tp, share = layout.cp, layout.tp, layout.share
    bounds = tuple(accumulate(media, initial=0))
    total = bounds[-1]
    of_context: Sequence[Intervals] = [intervals.whole(total)]
    if cp > 1 and share == "media":
        parts = media_shares(media, cp)
        of_context = [intervals.union([(bounds[part.start], bounds[part.stop])]) for part in parts]
    elif cp > 1 and share == "zigzag":
        of_context = positions(total, cp, 1, sequence_parallel=False, documents=bounds)
    elif cp > 1:
        if total % cp:
            raise ValueError(
                f"{total} rows of a source lane do not divide among CP={cp}: pad the rows, or share whole "
                "media"
            )
        of_context = intervals.parts(intervals.whole(total), cp)
    if not layout.sequence_parallel:
        return tuple(rows for rows in of_context for _ in range(tp))
    for n in map(intervals.count, of_context):
        if n % tp:
            raise ValueError(
                f"{n} rows of a source lane do not divide among TP={tp} for sequence parallelism: pad the "
                "rows, or gather the output"
            )
    return tuple(part for rows in of_context for part in intervals.parts(rows, tp))


def rows_at(runs: Sequence[Runs], owned: Sequence[Sequence[Intervals]]) -> tuple[Intervals, ...]:
    """Rows of a lane that lie at the positions of each of its ranks."""
    found: list[list[tuple[int, int]]] = [[] for _ in owned[0]] if owned else []
    before = 0
    for sample, ranks in zip(runs, owned, strict=True):
        marked = intervals.union((first, first + rows) for first, rows in sample)
        rows = rows_of(sample)
        if intervals.count(marked) != rows or list(sample) != sorted(sample):
            raise ValueError(
                f"runs {list(sample)[:20]} (position, rows) overlap or do not ascend: give each position "
                "once, in order"
            )
        places = IntervalIndex(marked)
        for rows_of_rank, own_positions in zip(found, ranks, strict=True):
            for first, last in own_positions:
                for place, start, stop in places.clip(first, last):
                    rows_of_rank.append((before + place, before + place + stop - start))
        before += rows
    return tuple(map(intervals.union, found))


def rows_of(runs: Runs) -> int:
    """Number of rows of one sample."""
    return sum(rows for _, rows in runs)


class RowSegment(NamedTuple):
    """Rows that are contiguous on both sides; starts are counted in the rows of each lane."""

    source_lane: int
    source_start: int
    lane: int
    start: int
    rows: int


def sample_shares(samples: int, lanes: int) -> tuple[range, ...]:
    """Equal contiguous shares of the samples, one for each lane; ValueError if they do not divide."""
    if samples % lanes:
        raise ValueError(
            f"{samples} samples of a microbatch do not divide among {lanes} data lanes: use a micro-batch "
            f"size that is a multiple of {lanes}"
        )
    share = samples // lanes
    return tuple(range(lane * share, (lane + 1) * share) for lane in range(lanes))


def segments(source: Sequence[int], destination: Sequence[int]) -> tuple[RowSegment, ...]:
    """Blocks of rows that are contiguous on both sides, from the number of rows of each lane."""
    source_ends, ends = list(accumulate(source)), list(accumulate(destination))
    found: list[RowSegment] = []
    first = source_lane = lane = 0
    while first < ends[-1]:
        while source_ends[source_lane] <= first:
            source_lane += 1
        while ends[lane] <= first:
            lane += 1
        source_start = first - source_ends[source_lane] + source[source_lane]
        start = first - ends[lane] + destination[lane]
        last = min(source_ends[source_lane], ends[lane])
        found.append(RowSegment(source_lane, source_start, lane, start, last - first))
        first = last
    return tuple(found)


def lane_rows(rows: Sequence[int], lanes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Number of rows of each lane."""
    return tuple(sum(rows[sample] for sample in mine) for mine in lanes)
