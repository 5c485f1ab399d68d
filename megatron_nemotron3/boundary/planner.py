"""From layouts and row counts to the sides of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import Runs, contiguous, lane_rows, positions, segments, wanted
from megatron_nemotron3.boundary.plan import Group, Mode, Plan, Side


def sending(layout: Layout, rows: Sequence[int]) -> Side:
    """The side of a module that gives rows: its last pipeline stage.

    Args:
        rows: of each lane.

    Raises:
        ValueError: context parallelism, under which rows have no order; or the rows of a lane
            do not divide among sequence-parallel ranks.
    """
    if layout.cp > 1:
        raise ValueError(f"the source layout {layout} has CP={layout.cp}: use CP 1 in modules that send")
    return tuple(
        _sharded(ranks, n)
        if layout.sequence_parallel and layout.tp > 1
        else (Group(ranks, intervals.whole(n)),)
        for ranks, n in zip(layout.lanes(layout.pp - 1), rows, strict=True)
    )


def _sharded(ranks: tuple[int, ...], rows: int) -> tuple[Group, ...]:
    if rows % len(ranks):
        raise ValueError(
            f"{rows} rows of a source lane do not divide among TP={len(ranks)} for sequence parallelism: pad "
            "them, or gather the output"
        )
    return tuple(
        Group((rank,), part)
        for rank, part in zip(ranks, intervals.parts(intervals.whole(rows), len(ranks)), strict=True)
    )


def receiving(
    layout: Layout, rows: Sequence[int], wants: Sequence[Sequence[Intervals]] | None = None
) -> Side:
    """The side of a module that takes rows: its first pipeline stage.

    Args:
        rows: of each lane.
        wants: of each lane, rows by rank (`slices.wanted`); None: every rank wants all rows of its lane.

    Raises:
        ValueError: context parallelism without `wants`.
    """
    lanes = layout.lanes(0)
    if wants is None:
        if layout.cp > 1:
            raise ValueError(
                f"the destination layout {layout} has CP={layout.cp}: which rows a context rank owns "
                "depends on their positions: give them (RowFeed)"
            )
        return tuple((Group(ranks, intervals.whole(n)),) for ranks, n in zip(lanes, rows, strict=True))
    # Without sequence parallelism the tensor ranks of a context rank want the same rows.
    share = 1 if layout.sequence_parallel else layout.tp
    return tuple(
        tuple(Group(ranks[i : i + share], mine[i]) for i in range(0, len(ranks), share))
        for ranks, mine in zip(lanes, wants, strict=True)
    )


def make_plan(
    source: Layout,
    destination: Layout,
    rows: Sequence[int],
    *,
    row_bytes: int,
    wants: Sequence[Sequence[Intervals]] | None = None,
    mode: Mode | None = None,
) -> Plan:
    """The forward plan of one microbatch and one modality.

    Args:
        rows: of each sample of the microbatch, over all lanes.
        row_bytes: bytes of a row.
        wants: see `receiving`; `slices_of` makes them.
        mode: None: "copies" where the layouts share ranks, "once" where they do not.

    Raises:
        ValueError: as `segments`, `contiguous`, `sending`, `receiving`.
    """
    given, taken = contiguous(len(rows), source.dp), contiguous(len(rows), destination.dp)
    if mode is None:
        shared = set(source.stage_ranks(source.pp - 1)) & set(destination.stage_ranks(0))
        mode = "copies" if shared else "once"
    return Plan(
        sending(source, lane_rows(rows, given)),
        receiving(destination, lane_rows(rows, taken), wants),
        segments(rows, given, taken),
        row_bytes,
        mode,
    )


def slices_of(
    layout: Layout,
    runs: Sequence[Runs],
    lengths: Sequence[int],
    samples: Sequence[Sequence[int]] | None = None,
    documents: Sequence[tuple[int, ...]] | None = None,
) -> tuple[tuple[Intervals, ...], ...]:
    """Rows that each rank of a context- or sequence-parallel module needs (`wants` of `make_plan`).

    Args:
        runs: of each sample, where its rows stand (`slices.Runs`).
        lengths: of each sample's sequence, padding included.
        samples: of each lane; None: equal shares in order.
        documents: of each sample, `cu_seqlens_padded` if it is packed, else ().

    Raises:
        ValueError: as `slices.positions`; or a row stands outside its sequence.
    """
    taken = contiguous(len(runs), layout.dp) if samples is None else samples
    cuts = documents or [()] * len(runs)
    for sample, (mine, length) in enumerate(zip(runs, lengths, strict=True)):
        if mine and sum(mine[-1]) > length:
            raise ValueError(
                f"sample {sample}: a row at position {sum(mine[-1]) - 1} of a sequence of {length}: rows and "
                "positions must be of the same batch"
            )
    owned = [
        positions(length, layout.cp, layout.tp, sequence_parallel=layout.sequence_parallel, documents=cut)
        for length, cut in zip(lengths, cuts, strict=True)
    ]
    empty: tuple[Intervals, ...] = ((),) * (layout.cp * layout.tp)
    return tuple(wanted([runs[s] for s in mine], [owned[s] for s in mine]) or empty for mine in taken)
