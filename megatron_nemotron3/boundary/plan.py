"""Who sends which rows to whom: a plan, made from data alone.

Rows cross between two sides. On a side, each data lane has a list of groups: ranks that hold (or want) the
same rows of the lane. Replicas of a lane are one group; context- and sequence-parallel slices are several.

Two ways to serve a group that wants rows:

    once    every row is sent to one rank of the group, an equal part to each rank, and the group gathers:
            between the modules each byte goes once. For modules on disjoint ranks, where links are slow.
    copies  every rank of the group is sent all rows that it does not hold itself: one phase. For modules that
            share ranks, where a rank often holds what it wants.

On the sending side each replica sends an equal part, so that no rank carries what others could. Where equal
parts gain nothing, one rank of the group, its leader, sends or receives everything, and a receiving group
broadcasts: if there is but one rank on the other side, which carries it all anyway, and for a few bytes.
A plan is the same on every rank, so no rank asks another about shapes. Backward is the plan with the sides
swapped.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import Intervals, Places
from megatron_nemotron3.boundary.partition import Segment

Mode = Literal["once", "copies"]
Ranks = tuple[int, ...]
#: Of two groups that exchange with no other, rows up to this many bytes take the leader path: latency is what
#: counts then. A cautious choice, not a measured one: in the alpha-beta model of benchmarks/boundary_model.py
#: equal parts begin to pay at 0.4 (4 ranks each) or 1.1 MiB (8) over NICs and at 2 or 6 MiB over NVLink;
#: below that the two differ by 20 us.
LEADER_BYTES = 64 * 1024


class Group(NamedTuple):
    """Ranks of one lane with the same rows, in the order in which parts are dealt; rows of the lane."""

    ranks: tuple[int, ...]
    rows: Intervals


#: lane -> groups.
Side = tuple[tuple[Group, ...], ...]


class Piece(NamedTuple):
    """`rows` rows from place `sent` of the sender's buffer to place `received` of the receiver's. A buffer
    holds the rows of its rank's group, in order."""

    sent: int
    received: int
    rows: int


class Message(NamedTuple):
    """Rows from one rank to another, or to itself; ascending in the receiver's buffer."""

    source: int
    destination: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """How many."""
        return sum(piece.rows for piece in self.pieces)


class Gather(NamedTuple):
    """What a group does after the messages: rank i of `ranks` has the places [i * part, (i + 1) * part) of
    `rows`, the last ones fewer or none; all want all. part == rows: the first rank has everything."""

    ranks: tuple[int, ...]
    rows: int
    part: int


@dataclass(frozen=True)
class Plan:
    """One crossing. `row_bytes` decides about the leader path (with `leader_bytes`) and counts traffic.

    Raises:
        ValueError: at `messages`, if a segment's rows are not held, or not wanted where it says.
    """

    holders: Side
    wanters: Side
    segments: tuple[Segment, ...]
    row_bytes: int
    mode: Mode = "once"
    leader_bytes: int = LEADER_BYTES

    @functools.cached_property
    def messages(self) -> tuple[Message, ...]:
        """All of them, by sender and receiver; those of a rank to itself included."""
        found: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        deal = self._once if self.mode == "once" else self._copies
        for holder, wanter, pieces in self._meetings:
            for source, destination, piece in deal(holder, wanter, pieces):
                found[source, destination].append(piece)
        self._check(found)
        return tuple(Message(*pair, _joined(pieces)) for pair, pieces in sorted(found.items()))

    @functools.cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Of groups of several ranks; none in mode "copies"."""
        if self.mode == "copies":
            return ()
        return tuple(
            Gather(group.ranks, n, self._parts[1][group.ranks])
            for lane in self.wanters
            for group in lane
            if len(group.ranks) > 1 and (n := intervals.count(group.rows))
        )

    @functools.cached_property
    def _by_rank(self) -> tuple[dict[int, list[Message]], dict[int, list[Message]], dict[int, Gather]]:
        sends: dict[int, list[Message]] = defaultdict(list)
        receives: dict[int, list[Message]] = defaultdict(list)
        for message in self.messages:
            sends[message.source].append(message)
            receives[message.destination].append(message)
        return sends, receives, {rank: gather for gather in self.gathers for rank in gather.ranks}

    def sends(self, rank: int) -> Sequence[Message]:
        """Messages of this sender, by receiver."""
        return self._by_rank[0].get(rank, ())

    def receives(self, rank: int) -> Sequence[Message]:
        """Messages to this receiver, by sender."""
        return self._by_rank[1].get(rank, ())

    def gather(self, rank: int) -> Gather | None:
        """What the rank's group does after the messages; None: nothing."""
        return self._by_rank[2].get(rank)

    @functools.cached_property
    def _held(self) -> dict[int, int]:
        return {rank: intervals.count(g.rows) for lane in self.holders for g in lane for rank in g.ranks}

    @functools.cached_property
    def _wanted(self) -> dict[int, int]:
        return {rank: intervals.count(g.rows) for lane in self.wanters for g in lane for rank in g.ranks}

    def rows_held(self, rank: int) -> int:
        """Rows of the buffer that the rank sends from."""
        return self._held.get(rank, 0)

    def rows_wanted(self, rank: int) -> int:
        """Rows of the buffer that the rank ends up with."""
        return self._wanted.get(rank, 0)

    @functools.cached_property
    def _meetings(self) -> list[tuple[Group, Group, list[Piece]]]:
        """Every two groups between which rows cross, and these rows, for each segment."""
        found: list[tuple[Group, Group, list[Piece]]] = []
        held = [[(group, Places(group.rows)) for group in lane] for lane in self.holders]
        wanted = [[(group, Places(group.rows)) for group in lane] for lane in self.wanters]
        for source_lane, source_start, lane, start, rows in self.segments:
            stop = start + rows
            takers = [(group, there) for group, places in wanted[lane] if (there := places.clip(start, stop))]
            for holder, places in held[source_lane]:
                given = places.clip(source_start, source_start + rows)
                for wanter, taken in takers if given else ():
                    if pieces := _common(given, taken, start - source_start):
                        found.append((holder, wanter, pieces))
        return found

    @functools.cached_property
    def _parts(self) -> tuple[dict[Ranks, int], dict[Ranks, int]]:
        """Of holders and of wanters: ranks of a group -> rows that its first rank has to itself."""
        met: tuple[dict[Ranks, set[Ranks]], dict[Ranks, set[Ranks]]] = (defaultdict(set), defaultdict(set))
        for holder, wanter, _ in self._meetings:
            met[0][holder.ranks].add(wanter.ranks)
            met[1][wanter.ranks].add(holder.ranks)

        def part(group: Group, side: int) -> int:
            rows, others = intervals.count(group.rows), met[side][group.ranks]
            if len(others) == 1:
                (other,) = others
                mutual = len(met[1 - side][other]) == 1
                if len(other) == 1 or (mutual and rows * self.row_bytes <= self.leader_bytes):
                    return rows
            return -(-rows // len(group.ranks))

        holders, wanters = (
            {group.ranks: part(group, side) for lane in lanes for group in lane}
            for side, lanes in enumerate((self.holders, self.wanters))
        )
        return holders, wanters

    def _once(self, holder: Group, wanter: Group, pieces: list[Piece]) -> Iterator[tuple[int, int, Piece]]:
        give, take = self._parts[0][holder.ranks], self._parts[1][wanter.ranks]
        for sent, received, rows in pieces:
            while rows:
                i, j = sent // give, received // take
                n = min(rows, (i + 1) * give - sent, (j + 1) * take - received)
                yield holder.ranks[i], wanter.ranks[j], Piece(sent, received, n)
                sent, received, rows = sent + n, received + n, rows - n

    def _copies(self, holder: Group, wanter: Group, pieces: list[Piece]) -> Iterator[tuple[int, int, Piece]]:
        # The copies for all who lack the rows are one line of rows, cut into equal parts for the holders.
        needy = [rank for rank in wanter.ranks if rank not in holder.ranks]
        rows = sum(piece.rows for piece in pieces)
        each = -(-rows * len(needy) // len(holder.ranks))
        if rows * self.row_bytes <= self.leader_bytes:  # small: no copy is cut
            each = -(-len(needy) // len(holder.ranks)) * rows
        for rank in wanter.ranks:
            if rank in holder.ranks:
                yield from ((rank, rank, piece) for piece in pieces)
        at = 0
        for rank in needy:
            for sent, received, n in pieces:
                while n:
                    i = at // each
                    some = min(n, (i + 1) * each - at)
                    yield holder.ranks[i], rank, Piece(sent, received, some)
                    sent, received, n, at = sent + some, received + some, n - some, at + some

    def _check(self, found: dict[tuple[int, int], list[Piece]]) -> None:
        """Every wanted row arrives once in each group (mode "once") or rank (mode "copies")."""
        arrived: dict[int, int] = defaultdict(int)
        for (_, destination), pieces in found.items():
            arrived[destination] += sum(piece.rows for piece in pieces)
        for lane, groups in enumerate(self.wanters):
            for ranks, rows in groups:
                wanted = intervals.count(rows)
                totals = (
                    {sum(arrived[rank] for rank in ranks)}
                    if self.mode == "once"
                    else {arrived[rank] for rank in ranks}
                )
                if totals != {wanted}:
                    raise ValueError(
                        f"destination lane {lane}, ranks {ranks}: {wanted} rows wanted, {sorted(totals)} "
                        "arrive: both sides must count the rows of every sample alike"
                    )

    def transposed(self) -> Plan:
        """The way back: gradients of the wanted rows to those who held them."""
        segments = tuple(segment.transposed() for segment in self.segments)
        return Plan(self.wanters, self.holders, segments, self.row_bytes, self.mode, self.leader_bytes)

    @functools.cached_property
    def backward(self) -> Plan:
        """The transposed plan, made once."""
        return self.transposed()


def _common(
    given: Sequence[tuple[int, int, int]], taken: Sequence[tuple[int, int, int]], by: int
) -> list[Piece]:
    """Rows in both (`Places.clip` of each side); a wanter's number of a row is the holder's plus `by`."""
    found: list[Piece] = []
    i = j = 0
    while i < len(given) and j < len(taken):
        sent, a, b = given[i]
        received, c, d = taken[j]
        a, b = a + by, b + by
        start, stop = max(a, c), min(b, d)
        if start < stop:
            found.append(Piece(sent + start - a, received + start - c, stop - start))
        if b < d:
            i += 1
        else:
            j += 1
    return found


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Ascending in the receiver's buffer; neighbors on both sides made one."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.received):
        last = joined[-1] if joined else None
        if last and (last.sent + last.rows, last.received + last.rows) == (piece.sent, piece.received):
            joined[-1] = last._replace(rows=last.rows + piece.rows)
        else:
            joined.append(piece)
    return tuple(joined)
