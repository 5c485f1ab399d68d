"""The traffic of a plan: rows and bytes of each rank and the distance to the lower bounds, also as text.

The bounds follow from the two sides of a plan alone, not from its messages, so that the two can be compared:

crossing    A group (ranks that want the same rows of a lane) can share what one of its ranks received, but
            each row has to be sent to one of them.
entering    The rows that enter a group of k ranks enter through k ranks, so one of them receives at least
            ceil(rows / k).
leaving     The same on the sending side: the rows that leave a group leave through its k ranks.
missing     A rank must receive the rows that it wants and does not hold, or gather them inside the group.

In mode "copies" ranks do not share: a rank receives all rows that it misses, and the senders send every copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.plan import Ranks, Side, TransferPlan, indexed
from megatron_nemotron3.common.output import count, table

MODES = {
    "once": "every row is sent once, in equal parts; groups of ranks gather the rest among themselves",
    "copies": "the modules share ranks: each rank receives the rows that it wants and does not hold",
}
#: Default number of lines of a table before it is shortened.
LINES = 32
#: Headers of columns that are aligned to the left.
LEFT_ALIGNED = ("sending ranks", "receiving ranks", "then")


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
                owed[sender.ranks] += n * (len(receiver.ranks) - len(members) if plan.mode == "copies" else 1)
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
                entering |= dict.fromkeys(ranks, -(-total // len(ranks)))
                crossing += total
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


def describe(plan: TransferPlan) -> dict[str, Any]:
    """What `explain` prints, as JSON types. Sizes are in bytes, except `rows` and `part`, which are in rows.

    sent, received: between the modules, or between ranks if the modules share them. Messages of a rank to
        itself are counted in `local`.
    *_bound: from `bounds`, for the busiest rank of the same group.
    """
    low, moved = bounds(plan), traffic(plan)
    ranks = sorted({*moved.sent, *moved.received})
    across = [message for message in plan.messages if message.source != message.destination]

    def size(rows: int) -> int:
        return rows * plan.row_bytes

    return {
        "mode": plan.mode,
        "row_bytes": plan.row_bytes,
        "crossing": size(moved.crossing),
        "crossing_bound": size(low.crossing),
        "busiest": size(moved.busiest),
        "busiest_bound": size(low.busiest),
        "gathered": size(sum(moved.gathered.values())),
        "local": size(sum(message.rows for message in plan.messages) - moved.crossing),
        "from": _side_entries(plan.senders),
        "to": _side_entries(plan.receivers),
        "messages": [
            {
                "from": message.source,
                "to": message.destination,
                "rows": message.rows,
                "bytes": size(message.rows),
                "pieces": len(message.pieces),
            }
            for message in across
        ],
        "gathers": [
            {
                "ranks": list(gather.ranks),
                "rows": gather.rows,
                "part": gather.part,
                "kind": "broadcast" if gather.is_broadcast else "all-gather",
            }
            for gather in plan.gathers
        ],
        "ranks": [
            {
                "rank": rank,
                "sent": size(moved.sent.get(rank, 0)),
                "sent_bound": size(low.leaving.get(rank, 0)),
                "received": size(moved.received.get(rank, 0)),
                "received_bound": size(low.entering.get(rank, 0)),
                "gathered": size(moved.gathered.get(rank, 0)),
                "wanted": size(plan.rows_wanted(rank)),
            }
            for rank in ranks
        ],
    }


def explain(plan: TransferPlan, *, lines: int = LINES) -> str:
    """Format a plan as tables of lanes, messages and bytes by rank, at most 100 columns wide.

    lines: maximum number of lines of each table; the middle of longer ones is left out.
    """
    about = describe(plan)
    messages = about["messages"]
    per_rank = about["ranks"]
    busy = [r["rank"] for r in per_rank if max(r["sent"], r["received"]) == about["busiest"]]
    who = f"rank {busy[0]}" + (f" and {len(busy) - 1:,} more" if len(busy) > 1 else "")
    gathers = {tuple(gather["ranks"]): _gather_text(gather) for gather in about["gathers"]}
    columns = ("sent", "sent_bound", "received", "received_bound", "gathered")
    text = [
        f"{about['mode']}: {MODES[plan.mode]}",
        f"crossing      {about['crossing']:>16,} bytes (bound {about['crossing_bound']:,}) "
        f"in {count(len(messages), 'message')}",
        f"busiest rank  {about['busiest']:>16,} bytes (bound {about['busiest_bound']:,}): {who}",
        f"in groups     {about['gathered']:>16,} bytes received from {count(len(gathers), 'gather')}",
        f"local         {about['local']:>16,} bytes copied within a rank",
    ]
    sending = [(g["lane"], ranks_text(g["ranks"]), f"{g['rows']:,}") for g in about["from"]]
    receiving = [
        (g["lane"], ranks_text(g["ranks"]), f"{g['rows']:,}", gathers.get(tuple(g["ranks"]), ""))
        for g in about["to"]
    ]
    sizes = [(m["from"], m["to"], f"{m['rows']:,}", f"{m['bytes']:,}", m["pieces"]) for m in messages]
    totals = [(r["rank"], *(f"{r[name]:,}" for name in columns)) for r in per_rank]
    tables: tuple[tuple[tuple[str, ...], Sequence[Sequence[object]]], ...] = (
        (("lane", "sending ranks", "rows"), sending),
        (("lane", "receiving ranks", "rows", "then"), receiving),
        (("sender", "receiver", "rows", "bytes", "pieces"), sizes),
        (("rank", "sends", "bound", "receives", "bound", "gathers"), totals),
    )
    for header, rows in tables:
        text += ["", *_text_table(header, rows, lines)]
    return "\n".join(text)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as "0-3,8-11", shortened if that is long."""
    runs = intervals.union((rank, rank + 1) for rank in ranks)
    parts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in runs]
    if len(parts) > 4:
        parts = [*parts[:3], f"… {parts[-1]} ({len(ranks)} ranks)"]
    return ",".join(parts)


def _side_entries(side: Side) -> list[dict[str, Any]]:
    return [
        {"lane": lane, "ranks": list(group.ranks), "rows": intervals.count(group.rows)}
        for lane, groups in enumerate(side)
        for group in groups
    ]


def _gather_text(gather: dict[str, Any]) -> str:
    if gather["kind"] == "broadcast":
        return f"broadcast from {gather['ranks'][0]}"
    return f"all-gather of {gather['part']:,} rows each"


def _text_table(header: Sequence[str], rows: Sequence[Sequence[object]], lines: int) -> list[str]:
    """Align text to the left and numbers to the right; show the beginning and the end of a long table."""
    first = -(-lines // 2) if len(rows) > lines else len(rows)
    last = min(len(rows), lines) - first
    shown = [*rows[:first], *rows[len(rows) - last :]]
    text = table([header, *shown], "".join("l" if name in LEFT_ALIGNED else "r" for name in header))
    if len(rows) > lines:
        text.insert(first + 1, f"… {len(rows) - lines:,} more" + " …" * bool(last))
    return text
