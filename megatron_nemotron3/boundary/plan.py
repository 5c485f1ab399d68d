"""A plan of one transfer between two modules: which rank sends which rows to which rank. Pure data.

A plan has two sides, the senders and the receivers. On each side, every data lane (data-parallel replica of
the module) has a list of groups: ranks that hold, or want, the same rows of the lane. The tensor-parallel
replicas of a lane are one group; context- and sequence-parallel slices are several groups.

There are two ways to bring rows to a group that wants them:

    once    Every row is sent to one rank of the group, an equal part to each rank, and the group gathers.
            Each byte is sent once between the modules. For modules on disjoint ranks, where links are slow.
    copies  Every rank of the group is sent all rows that it does not hold itself, in one phase. For modules
            that share ranks, where a rank often holds what it wants.

On the sending side each replica sends an equal part, which balances the load. Where equal parts gain nothing,
one rank of the group, its leader, sends or receives everything, and a receiving group broadcasts. That is so
if the other side is a single rank, which handles all rows anyway, and for a few bytes.
A plan is the same on every rank, so ranks need not exchange shapes. The backward plan has the sides swapped.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import IntervalIndex, Intervals
from megatron_nemotron3.boundary.partition import RowSegment

Mode = Literal["once", "copies"]
Ranks = tuple[int, ...]
#: Two groups that exchange with no other group use their leaders up to this many bytes, because latency then
#: dominates. The value is cautious, not measured: in the alpha-beta model of benchmarks/boundary_model.py
#: equal parts begin to pay at 0.4 (4 ranks each) or 1.1 MiB (8) over NICs and at 2 or 6 MiB over NVLink;
#: below that the two differ by 20 us.
LEADER_BYTES = 64 * 1024


class ReplicaGroup(NamedTuple):
    """Ranks that have the same rows of one lane; equal parts are assigned in the order of `ranks`."""

    ranks: tuple[int, ...]
    rows: Intervals


#: lane -> groups.
Side = tuple[tuple[ReplicaGroup, ...], ...]


class RowPiece(NamedTuple):
    """`rows` contiguous rows: from index `sent` of the sender's buffer to index `received` of the receiver's.

    A rank's buffer holds the rows of its group, in order.
    """

    sent: int
    received: int
    rows: int


class Message(NamedTuple):
    """Rows from one rank to another, or to itself; the pieces ascend in the receiver's buffer."""

    source: int
    destination: int
    pieces: tuple[RowPiece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


class Gather(NamedTuple):
    """The collective of a group after the messages, by which all its ranks get all `rows` rows.

    Before it, rank i of `ranks` has the rows [i * part, (i + 1) * part); the last ranks have fewer or none.
    """

    ranks: tuple[int, ...]
    rows: int
    part: int

    @property
    def is_broadcast(self) -> bool:
        """Whether the first rank has all rows and broadcasts them; otherwise the group all-gathers."""
        return self.part == self.rows


@dataclass(frozen=True)
class TransferPlan:
    """The transfer of one modality of one microbatch in one direction.

    segments: which rows of a sending lane are which rows of a receiving lane.
    leader_bytes: largest transfer for which leaders are used.
    """

    senders: Side
    receivers: Side
    segments: tuple[RowSegment, ...]
    row_bytes: int
    mode: Mode = "once"
    leader_bytes: int = LEADER_BYTES

    @functools.cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages, sorted by sender and receiver, including those of a rank to itself."""
        found: dict[tuple[int, int], list[RowPiece]] = defaultdict(list)
        assign = self._pieces_once if self.mode == "once" else self._pieces_copies
        for sender, receiver, pieces in self._group_pairs:
            for source, destination, piece in assign(sender, receiver, pieces):
                found[source, destination].append(piece)
        self._check_coverage(found)
        return tuple(Message(*pair, _merged_pieces(pieces)) for pair, pieces in sorted(found.items()))

    @functools.cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Gathers of all groups of several ranks; none in mode "copies"."""
        if self.mode == "copies":
            return ()
        return tuple(
            Gather(group.ranks, n, self._parts[1][group.ranks])
            for lane in self.receivers
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
        """Messages that the rank sends, sorted by receiver."""
        return self._by_rank[0].get(rank, ())

    def receives(self, rank: int) -> Sequence[Message]:
        """Messages that the rank receives, sorted by sender."""
        return self._by_rank[1].get(rank, ())

    def gather(self, rank: int) -> Gather | None:
        return self._by_rank[2].get(rank)

    @functools.cached_property
    def _rows_by_rank(self) -> tuple[dict[int, int], dict[int, int]]:
        held, wanted = (
            {rank: intervals.count(group.rows) for lane in side for group in lane for rank in group.ranks}
            for side in (self.senders, self.receivers)
        )
        return held, wanted

    def rows_held(self, rank: int) -> int:
        return self._rows_by_rank[0].get(rank, 0)

    def rows_wanted(self, rank: int) -> int:
        return self._rows_by_rank[1].get(rank, 0)

    @functools.cached_property
    def _group_pairs(self) -> list[tuple[ReplicaGroup, ReplicaGroup, list[RowPiece]]]:
        """All pairs of groups that exchange rows, with these rows, for each segment."""
        found: list[tuple[ReplicaGroup, ReplicaGroup, list[RowPiece]]] = []
        held = [[(group, IntervalIndex(group.rows)) for group in lane] for lane in self.senders]
        wanted = [[(group, IntervalIndex(group.rows)) for group in lane] for lane in self.receivers]
        for source_lane, source_start, lane, start, rows in self.segments:
            stop = start + rows
            matches = [
                (group, there) for group, places in wanted[lane] if (there := places.clip(start, stop))
            ]
            for sender, places in held[source_lane]:
                held_here = places.clip(source_start, source_start + rows)
                for receiver, wanted_here in matches if held_here else ():
                    if pieces := _common_pieces(held_here, wanted_here, start - source_start):
                        found.append((sender, receiver, pieces))
        return found

    @functools.cached_property
    def _parts(self) -> tuple[dict[Ranks, int], dict[Ranks, int]]:
        """For senders and for receivers: ranks of a group -> rows in the equal part of its first rank."""
        peers: tuple[dict[Ranks, set[Ranks]], dict[Ranks, set[Ranks]]] = (defaultdict(set), defaultdict(set))
        for sender, receiver, _ in self._group_pairs:
            peers[0][sender.ranks].add(receiver.ranks)
            peers[1][receiver.ranks].add(sender.ranks)

        def part(group: ReplicaGroup, side: int) -> int:
            rows, others = intervals.count(group.rows), peers[side][group.ranks]
            if len(others) == 1:
                (other,) = others
                mutual = len(peers[1 - side][other]) == 1
                if len(other) == 1 or (mutual and rows * self.row_bytes <= self.leader_bytes):
                    return rows
            return -(-rows // len(group.ranks))

        senders, receivers = (
            {group.ranks: part(group, side) for lane in lanes for group in lane}
            for side, lanes in enumerate((self.senders, self.receivers))
        )
        return senders, receivers

    def _pieces_once(
        self, sender: ReplicaGroup, receiver: ReplicaGroup, pieces: list[RowPiece]
    ) -> Iterator[tuple[int, int, RowPiece]]:
        sent_part, received_part = self._parts[0][sender.ranks], self._parts[1][receiver.ranks]
        for sent, received, rows in pieces:
            while rows:
                i, j = sent // sent_part, received // received_part
                n = min(rows, (i + 1) * sent_part - sent, (j + 1) * received_part - received)
                yield sender.ranks[i], receiver.ranks[j], RowPiece(sent, received, n)
                sent, received, rows = sent + n, received + n, rows - n

    def _pieces_copies(
        self, sender: ReplicaGroup, receiver: ReplicaGroup, pieces: list[RowPiece]
    ) -> Iterator[tuple[int, int, RowPiece]]:
        # The concatenated copies are cut into equal parts, one for each sender.
        lacking = [rank for rank in receiver.ranks if rank not in sender.ranks]
        rows = sum(piece.rows for piece in pieces)
        each = -(-rows * len(lacking) // len(sender.ranks))
        if rows * self.row_bytes <= self.leader_bytes:  # small: whole copies only
            each = -(-len(lacking) // len(sender.ranks)) * rows
        for rank in receiver.ranks:
            if rank in sender.ranks:
                yield from ((rank, rank, piece) for piece in pieces)
        at = 0
        for rank in lacking:
            for sent, received, n in pieces:
                while n:
                    i = at // each
                    some = min(n, (i + 1) * each - at)
                    yield sender.ranks[i], rank, RowPiece(sent, received, some)
                    sent, received, n, at = sent + some, received + some, n - some, at + some

    def _check_coverage(self, found: dict[tuple[int, int], list[RowPiece]]) -> None:
        """Check that every wanted row arrives once in each group (mode "once") or rank (mode "copies")."""
        arrived: dict[int, int] = defaultdict(int)
        for (_, destination), pieces in found.items():
            arrived[destination] += sum(piece.rows for piece in pieces)
        for lane, groups in enumerate(self.receivers):
            for ranks, rows in groups:
                wanted = intervals.count(rows)
                totals = {arrived[rank] for rank in ranks}
                if self.mode == "once":
                    totals = {sum(arrived[rank] for rank in ranks)}
                if totals != {wanted}:
                    raise ValueError(
                        f"destination lane {lane}, ranks {ranks}: {wanted} rows wanted, {sorted(totals)} "
                        "arrive: both sides must count the rows of every sample alike"
                    )

    @functools.cached_property
    def backward(self) -> TransferPlan:
        """The plan with the sides swapped: gradients of rows go to the ranks that sent the rows."""
        segments = tuple(
            RowSegment(s.lane, s.start, s.source_lane, s.source_start, s.rows) for s in self.segments
        )
        return TransferPlan(
            self.receivers, self.senders, segments, self.row_bytes, self.mode, self.leader_bytes
        )


def _common_pieces(
    held: Sequence[tuple[int, int, int]], wanted: Sequence[tuple[int, int, int]], by: int
) -> list[RowPiece]:
    """Rows in both (`IntervalIndex.clip` of each side); the receiver's numbers are the sender's plus `by`."""
    found: list[RowPiece] = []
    i = j = 0
    while i < len(held) and j < len(wanted):
        sent, a, b = held[i]
        received, c, d = wanted[j]
        a, b = a + by, b + by
        start, stop = max(a, c), min(b, d)
        if start < stop:
            found.append(RowPiece(sent + start - a, received + start - c, stop - start))
        if b < d:
            i += 1
        else:
            j += 1
    return found


def _merged_pieces(pieces: list[RowPiece]) -> tuple[RowPiece, ...]:
    """Sort by index in the receiver's buffer; merge pieces that are adjacent on both sides."""
    joined: list[RowPiece] = []
    for piece in sorted(pieces, key=lambda p: p.received):
        last = joined[-1] if joined else None
        if last and (last.sent + last.rows, last.received + last.rows) == (piece.sent, piece.received):
            joined[-1] = last._replace(rows=last.rows + piece.rows)
        else:
            joined.append(piece)
    return tuple(joined)
