"""Lower bounds for the traffic between two modules, and the traffic of a plan, counted in rows.

The bounds follow from the two sides of a plan alone, not from its messages, so that the two can be compared:

crossing    A group (ranks that want the same rows of a lane) can share what one of its ranks received, but
            each row that no rank of the group holds has to be sent to one of them.
entering    The rows that enter a group of k ranks enter through k ranks, so one of them receives at least
            ceil(rows / k).
leaving     The same on the sending side: the rows that leave a group leave through its k ranks.
missing     A rank must receive the rows that it wants and does not hold, or gather them inside the group.

In mode "copies" ranks do not share: a rank receives all rows that it misses, and the senders send every copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.plan import Ranks, TransferPlan, indexed


class Bounds(NamedTuple):
    """Minimum number of rows: by rank, for the busiest rank of its group or (missing) for itself; of all."""

    leaving: Mapping[int, int]
    entering: Mapping[int, int]
    missing: Mapping[int, int]
    crossing: int

    @property
    def busiest(self) -> int:
        return max([0, *self.leaving.values(), *self.entering.values()])


class Traffic(NamedTuple):
    """Rows that a plan moves, by rank. A rank's messages to itself are local copies and do not count."""

    sent: Mapping[int, int]
    received: Mapping[int, int]
    #: Received from the other ranks of the group, in the gather.
    gathered: Mapping[int, int]

    @property
    def crossing(self) -> int:
        return sum(self.sent.values())

    @property
    def busiest(self) -> int:
        return max([0, *self.sent.values(), *self.received.values()])


def bounds(plan: TransferPlan) -> Bounds:
    """Lower bounds for a plan whose sending groups hold disjoint rows of a lane, as those of `make_plan`."""
    #: Ranks of a sending group -> rows that it has to send to other ranks.
    owed: dict[Ranks, int] = defaultdict(int)
    #: Rank -> rows that it wants and holds.
    has: dict[int, int] = defaultdict(int)
    #: Ranks of a receiving group -> rows that it wants and one of its ranks holds.
    inside: dict[Ranks, int] = defaultdict(int)
    senders, receivers = indexed(plan.senders), indexed(plan.receivers)
    for source_lane, source_start, lane, start, rows in plan.segments:
        by = start - source_start
        for sender, places in senders[source_lane]:
            held = [(a + by, b + by) for _, a, b in places.clip(source_start, source_start + rows)]
            for receiver, wants in receivers[lane] if held else ():
                n = sum(stop - first for a, b in held for _, first, stop in wants.clip(a, b))
                members = [rank for rank in receiver.ranks if rank in sender.ranks] if n else []
                for rank in members:
                    has[rank] += n
                inside[receiver.ranks] += n * bool(members)
                copies = len(receiver.ranks) - len(members) if plan.mode == "copies" else not members
                owed[sender.ranks] += n * copies
    leaving = {
        rank: -(-owed[group.ranks] // len(group.ranks))
        for lane in plan.senders
        for group in lane
        for rank in group.ranks
    }
    entering: dict[int, int] = {}
    missing: dict[int, int] = {}
    crossing = 0
    for groups in plan.receivers:
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


def traffic(plan: TransferPlan) -> Traffic:
    """Count the rows that a plan moves."""
    sent = {rank: 0 for lane in plan.senders for group in lane for rank in group.ranks}
    received = {rank: 0 for lane in plan.receivers for group in lane for rank in group.ranks}
    for message in plan.messages:
        if message.source != message.destination:
            sent[message.source] += message.rows
            received[message.destination] += message.rows
    gathered = dict.fromkeys(received, 0)
    for ranks, rows, part in plan.gathers:
        for number, rank in enumerate(ranks):
            gathered[rank] = rows - max(min(rows - number * part, part), 0)
    return Traffic(sent, received, gathered)
