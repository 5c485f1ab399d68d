"""A plan of one transfer between two modules: which rank sends which rows to which rank. Pure data.

On each side, every data lane has a list of groups: ranks that hold, or want, the same rows of the lane. The
tensor-parallel replicas of a lane are one group; context- and sequence-parallel slices are several groups.

    once    Every row is sent to one rank of a group, an equal part to each rank, and the group gathers. For
            modules on disjoint ranks, where links are slow.
    copies  Every rank of a group is sent all rows that it does not hold itself, in one phase. For modules
            that share ranks.

Each replica sends an equal part. Where that gains nothing (the other side is a single rank, or there are few
bytes), one rank of the group, its leader, sends or receives everything, and a receiving group broadcasts.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import IntervalIndex, Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import (
    RowSegment,
    Runs,
    lane_rows,
    positions,
    rows_at,
    rows_held,
    sample_shares,
    segments,
)

Ranks = tuple[int, ...]
#: Two groups that exchange with no other group use their leaders up to this many bytes, because latency then
#: dominates. The value is cautious, not measured.
LEADER_BYTES = 64 * 1024


class ReplicaGroup(NamedTuple):
    """Ranks that have the same rows of one lane; equal parts are assigned in the order of `ranks`."""

    ranks: Ranks
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

    ranks: Ranks
    rows: int
    part: int

    @property
    def is_broadcast(self) -> bool:
        """Whether the first rank has all rows and broadcasts them; otherwise the group all-gathers."""
        return self.part == self.rows


@dataclass(frozen=True)
class TransferPlan:
    """The transfer of one modality of one microbatch in one direction; the same on every rank."""

    senders: Side
    receivers: Side
    segments: tuple[RowSegment, ...]
    row_bytes: int
    #: Largest transfer for which leaders are used.
    leader_bytes: int = LEADER_BYTES

    @functools.cached_property
    def mode(self) -> Literal["once", "copies"]:
        holding, wanting = self._rows_by_rank
        return "once" if holding.keys().isdisjoint(wanting) else "copies"

    @functools.cached_property
    def digest(self) -> int:
        """The same on ranks that count the rows alike."""
        return zlib.crc32(repr((self.segments, self.senders, self.receivers)).encode())

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
        return self._by_rank[0].get(rank, ())

    def receives(self, rank: int) -> Sequence[Message]:
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
        found = []
        held, wanted = indexed(self.senders), indexed(self.receivers)
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
        return TransferPlan(self.receivers, self.senders, segments, self.row_bytes, self.leader_bytes)


def indexed(side: Side) -> list[list[tuple[ReplicaGroup, IntervalIndex]]]:
    """The groups of each lane with an index of their rows."""
    return [[(group, IntervalIndex(group.rows)) for group in lane] for lane in side]


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


def groups_of(
    layout: Layout, stage: int, rows: Sequence[int], slices: Sequence[Sequence[Intervals]] | None = None
) -> Side:
    """Groups of ranks of a stage, with the rows that they hold or want; without `slices` all, by lane."""
    lanes = layout.lanes(stage)
    if slices is None:
        return tuple((ReplicaGroup(ranks, intervals.whole(n)),) for ranks, n in zip(lanes, rows, strict=True))
    return tuple(
        tuple(ReplicaGroup(same, mine[ranks.index(same[0])]) for same in layout.same_rows(ranks))
        for ranks, mine in zip(lanes, slices, strict=True)
    )


def make_plan(
    source: Layout,
    destination: Layout,
    rows: Sequence[int],
    *,
    row_bytes: int,
    slices: Sequence[Sequence[Intervals]] | None = None,
    media: Sequence[Sequence[int]] | None = None,
) -> TransferPlan:
    """The forward plan of one microbatch and one modality: in mode "copies" if the layouts share ranks.

    Args:
        rows: number of rows of each sample of the microbatch, over all lanes.
        slices: rows that each rank wants, from `slices_of`; None: all rows of its lane.
        media: for each sample, the rows of each medium, if the source has context parallelism; None: the
            rows of a sample are one medium.

    Raises:
        ValueError: samples or rows do not divide among the ranks, or a plan of mode "once" has no slices for
            a destination with context parallelism.
    """
    sent, received = sample_shares(len(rows), source.dp), sample_shares(len(rows), destination.dp)
    if any(n < 0 for n in rows):
        raise ValueError(f"row counts {list(rows)[:20]}: counts start at 0")
    held, wanted = lane_rows(rows, sent), lane_rows(rows, received)
    source.check_sender()
    parts = None
    if source.sliced:
        by_sample = media or [(n,) if n else () for n in rows]
        by_lane = [[n for sample in mine for n in by_sample[sample]] for mine in sent]
        parts = [rows_held(mine, source) for mine in by_lane]
    senders = groups_of(source, source.pp - 1, held, parts)
    receivers = groups_of(destination, 0, wanted, slices)
    plan = TransferPlan(senders, receivers, segments(held, wanted), row_bytes)
    if plan.mode == "once" and slices is None and destination.cp > 1:
        raise ValueError(
            f"the destination layout {destination} has CP={destination.cp}, so the rows of a context rank "
            "depend on their positions: give them (RowFeed)"
        )
    return plan


def slices_of(
    layout: Layout, runs: Sequence[Runs], lengths: Sequence[int], documents: Sequence[tuple[int, ...]] = ()
) -> tuple[tuple[Intervals, ...], ...]:
    """By lane, the rows that each rank of a context- or sequence-parallel module wants."""
    for sample, (mine, length) in enumerate(zip(runs, lengths, strict=True)):
        if mine and sum(mine[-1]) > length:
            raise ValueError(
                f"sample {sample}: a row at position {sum(mine[-1]) - 1} of a sequence of {length}: rows and "
                "positions must be of the same batch"
            )
    owned = [
        positions(length, layout.cp, layout.tp, sequence_parallel=layout.sequence_parallel, documents=cut)
        for length, cut in zip(lengths, documents or [()] * len(runs), strict=True)
    ]
    empty: tuple[Intervals, ...] = ((),) * (layout.cp * layout.tp)
    return tuple(
        rows_at([runs[s] for s in mine], [owned[s] for s in mine]) or empty
        for mine in sample_shares(len(runs), layout.dp)
    )
