"""Make plans from layouts, row counts and positions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import (
    Runs,
    lane_rows,
    positions,
    rows_at,
    rows_held,
    sample_shares,
    segments,
)
from megatron_nemotron3.boundary.plan import Mode, ReplicaGroup, Side, TransferPlan


def sender_groups(layout: Layout, rows: Sequence[int], media: Sequence[Sequence[int]] | None = None) -> Side:
    """Groups of ranks of the last stage, with the rows that they hold; `media`: rows of each, by lane."""
    layout.check_sender()
    held = None
    if layout.sliced:
        sp = layout.sequence_parallel
        held = [
            rows_held(mine, layout.cp, layout.tp, share=layout.share, sequence_parallel=sp)
            for mine in media or [[n] for n in rows]
        ]
    return groups_of(layout, layout.pp - 1, rows, held)


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
        source, destination: layouts of the sending and the receiving module.
        rows: number of rows of each sample of the microbatch, over all lanes.
        row_bytes: bytes of a row.
        slices: rows that each rank wants, from `slices_of`; None: all rows of its lane.
        media: for each sample, the rows of each medium, if the source has context parallelism; None: the
            rows of a sample are one medium.

    Raises:
        ValueError: samples or rows do not divide among the ranks, or a plan of mode "once" has no slices for
            a destination with context parallelism.
    """
    sent, received = sample_shares(len(rows), source.dp), sample_shares(len(rows), destination.dp)
    receivers = groups_of(destination, 0, lane_rows(rows, received), slices)
    sending = {rank for lane in source.lanes(source.pp - 1) for rank in lane}
    shared = any(rank in sending for lane in destination.lanes(0) for rank in lane)
    mode: Mode = "copies" if shared else "once"
    if mode == "once" and slices is None and destination.cp > 1:
        raise ValueError(
            f"the destination layout {destination} has CP={destination.cp}, so the rows of a context rank "
            "depend on their positions: give them (RowFeed)"
        )
    by_sample = media or [(n,) if n else () for n in rows]
    by_lane = [[n for sample in mine for n in by_sample[sample]] for mine in sent]
    senders = sender_groups(source, lane_rows(rows, sent), by_lane)
    return TransferPlan(senders, receivers, segments(rows, sent, received), row_bytes, mode)


def slices_of(
    layout: Layout,
    runs: Sequence[Runs],
    lengths: Sequence[int],
    documents: Sequence[tuple[int, ...]] = (),
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
