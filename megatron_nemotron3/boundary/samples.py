"""Which lane owns which samples of a microbatch, and what that makes of rows.

The contract of upstream's MIMO: rows are in sample-major, position order, and every data lane of a module has
a contiguous share of the microbatch's samples. Ownership is by sample, so numbers of lanes need not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Segment(NamedTuple):
    """`rows` rows that lie together on both sides: from row `source_start` of `source_lane` on, and from row
    `start` of `lane` on, both counted in the lane's rows."""

    source_lane: int
    source_start: int
    lane: int
    start: int
    rows: int

    def transposed(self) -> Segment:
        """The way back."""
        return Segment(self.lane, self.start, self.source_lane, self.source_start, self.rows)


def contiguous(samples: int, lanes: int) -> tuple[range, ...]:
    """Equal shares, in order.

    Raises:
        ValueError: the samples do not divide.
    """
    if samples % lanes:
        raise ValueError(
            f"{samples} samples of a microbatch do not divide among {lanes} data lanes: use a micro-batch "
            "size for which they do"
        )
    share = samples // lanes
    return tuple(range(lane * share, (lane + 1) * share) for lane in range(lanes))


def segments(
    rows: Sequence[int], source: Sequence[Sequence[int]], destination: Sequence[Sequence[int]]
) -> tuple[Segment, ...]:
    """Where the rows of every sample lie on both sides.

    Args:
        rows: of each sample; 0 for a sample without this modality.
        source, destination: samples that each lane owns, in the order of its rows (`contiguous`).

    Raises:
        ValueError: a sample is owned twice on a side, or not on both, or its row count is negative.
    """
    for side, lanes in (("source", source), ("destination", destination)):
        owned = [sample for lane in lanes for sample in lane]
        if sorted(owned) != list(range(len(rows))):
            raise ValueError(
                f"{side} lanes own samples {owned[:20]}: each of 0..{len(rows) - 1} must be owned once"
            )
    if any(n < 0 for n in rows):
        raise ValueError(f"row counts {list(rows)[:20]}: counts start at 0")
    place: dict[int, tuple[int, int]] = {}
    for lane, mine in enumerate(source):
        starts = accumulate((rows[sample] for sample in mine), initial=0)
        place |= {sample: (lane, start) for sample, start in zip(mine, starts, strict=False)}
    found: list[Segment] = []
    for lane, mine in enumerate(destination):
        start = 0
        for sample in mine:
            n = rows[sample]
            source_lane, source_start = place[sample]
            last = found[-1] if found else None
            if not n:
                continue
            if (
                last
                and (last.lane, last.source_lane) == (lane, source_lane)
                and last.source_start + last.rows == source_start
            ):
                found[-1] = last._replace(rows=last.rows + n)
            else:
                found.append(Segment(source_lane, source_start, lane, start, n))
            start += n
    return tuple(found)


def lane_rows(rows: Sequence[int], lanes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Rows that each lane holds."""
    return tuple(sum(rows[sample] for sample in mine) for mine in lanes)
