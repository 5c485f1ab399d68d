"""A plan as text and as a dictionary: messages, bytes of each rank, and the distance to the lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.bounds import bounds, traffic
from megatron_nemotron3.boundary.plan import Side, TransferPlan
from megatron_nemotron3.common.output import table

MODES = {
    "once": "every row is sent once, in equal parts; groups of ranks gather the rest among themselves",
    "copies": "the modules share ranks: each rank receives the rows that it wants and does not hold",
}
#: Default number of lines of a table before it is shortened.
LINES = 32
#: Headers of columns that are aligned to the left.
LEFT_ALIGNED = ("sending ranks", "receiving ranks", "then")


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
        f"in {_count_text(len(messages), 'message')}",
        f"busiest rank  {about['busiest']:>16,} bytes (bound {about['busiest_bound']:,}): {who}",
        f"in groups     {about['gathered']:>16,} bytes received from {_count_text(len(gathers), 'gather')}",
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


def _count_text(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _text_table(header: Sequence[str], rows: Sequence[Sequence[object]], lines: int) -> list[str]:
    """Align text to the left and numbers to the right; show the beginning and the end of a long table."""
    first = -(-lines // 2) if len(rows) > lines else len(rows)
    last = min(len(rows), lines) - first
    shown = [*rows[:first], *rows[len(rows) - last :]]
    text = table([header, *shown], "".join("l" if name in LEFT_ALIGNED else "r" for name in header))
    if len(rows) > lines:
        text.insert(first + 1, f"… {len(rows) - lines:,} more" + " …" * bool(last))
    return text
