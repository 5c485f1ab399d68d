"""What a crossing must move at least, and what a plan moves. Counted in rows; times `row_bytes` for bytes.

Written from the sides of a plan alone, without looking at its messages, so that the two can be compared:

crossing    A group (ranks that want the same rows of a lane) can share inside what has come to one of them,
            but each row that none of them holds has to come to one. In all: V for a replicated destination,
            the sum of the slices for context and sequence parallelism: V again, as slices are disjoint.
entering    The rows that enter a group of k ranks enter through k ranks: one of them takes ceil(rows / k) or
            more. With lanes of equal size that is V / |D|, D the destination's boundary ranks.
leaving     The same on the other side: rows that leave the holders of a lane leave through k ranks. V / |S|.
missing     Whatever the way, a rank must receive the rows that it wants and does not hold. What of them did
            not cross to the rank itself is gathered inside the group: (k - 1) / k of the lane's rows.

In mode "copies" ranks do not share: what enters a rank is what it misses, and what leaves the holders is
every copy that they are asked for. (Receivers that pass rows on could take that off them, in a second phase.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.plan import Plan


@dataclass(frozen=True)
class Bounds:
    """Least rows by rank: `leaving` and `entering` for the busiest rank of the rank's group, `missing` for
    each rank; `crossing` of all together."""

    leaving: Mapping[int, int]
    entering: Mapping[int, int]
    missing: Mapping[int, int]
    crossing: int

    @property
    def busiest(self) -> int:
        """The rank that must send or receive most between the modules does at least this."""
        return max([0, *self.leaving.values(), *self.entering.values()])


@dataclass(frozen=True)
class Traffic:
    """Rows of a plan by rank. A rank's messages to itself are memory copies and do not count."""

    sent: Mapping[int, int]
    received: Mapping[int, int]
    #: Received from the other ranks of the group, in the gather.
    gathered: Mapping[int, int]

    @property
    def crossing(self) -> int:
        """Sent by all together."""
        return sum(self.sent.values())

    @property
    def busiest(self) -> int:
        """Most that one rank sends or receives between the modules."""
        return max([0, *self.sent.values(), *self.received.values()])


def bounds(plan: Plan) -> Bounds:
    """Lower bounds of a plan's sides (each row of a lane is held by one group, as `sides` makes them)."""
    asked: dict[tuple[int, ...], int] = defaultdict(int)  # of a group of holders, by outsiders
    has: dict[int, int] = defaultdict(int)  # rows that a rank wants and holds
    inside: dict[tuple[int, ...], int] = defaultdict(int)  # rows that a group wants and a member holds
    for source_lane, source_start, lane, start, rows in plan.segments:
        here = ((source_start, source_start + rows),)
        for holder in plan.holders[source_lane]:
            held = intervals.shift(intervals.intersect(holder.rows, here), start - source_start)
            for wanter in plan.wanters[lane] if held else ():
                n = intervals.count(intervals.intersect(held, wanter.rows))
                members = [rank for rank in wanter.ranks if rank in holder.ranks] if n else []
                for rank in members:
                    has[rank] += n
                inside[wanter.ranks] += n * bool(members)
                outsiders = len(wanter.ranks) - len(members) if plan.mode == "copies" else not members
                asked[holder.ranks] += n * outsiders
    leaving = {
        rank: -(-asked[group.ranks] // len(group.ranks))
        for lane in plan.holders
        for group in lane
        for rank in group.ranks
    }
    entering: dict[int, int] = {}
    missing: dict[int, int] = {}
    crossing = 0
    for groups in plan.wanters:
        for ranks, wanted in groups:
            total = intervals.count(wanted)
            missing |= {rank: total - has[rank] for rank in ranks}
            if plan.mode == "copies":
                entering |= {rank: missing[rank] for rank in ranks}
                crossing += sum(missing[rank] for rank in ranks)
            else:
                enter = total - inside[ranks]
                entering |= dict.fromkeys(ranks, -(-enter // len(ranks)))
                crossing += enter
    return Bounds(leaving, entering, missing, crossing)


def traffic(plan: Plan) -> Traffic:
    """What a plan moves."""
    sent = {rank: 0 for lane in plan.holders for group in lane for rank in group.ranks}
    received = {rank: 0 for lane in plan.wanters for group in lane for rank in group.ranks}
    for message in plan.messages:
        if message.source != message.destination:
            sent[message.source] += message.rows
            received[message.destination] += message.rows
    gathered = dict.fromkeys(received, 0)
    for ranks, rows, part in plan.gathers:
        for number, rank in enumerate(ranks):
            gathered[rank] = rows - max(min(rows - number * part, part), 0)
    return Traffic(sent, received, gathered)
