"""Make plans from layouts, row counts and positions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_nemotron3.boundary import intervals
from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import Runs, lane_rows, positions, sample_shares, segments, wanted
from megatron_nemotron3.boundary.plan import Group, Mode, Plan, Side


def sending(layout: Layout, rows: Sequence[int]) -> Side:
    """The sending side: the last pipeline stage of a module.

    Args:
        layout: of the module.
        rows: number of rows of each lane.

    Raises:
        ValueError: the module has context parallelism, so its rows have no order; or the rows of a lane do
            not divide among sequence-parallel ranks.
    """
    if layout.cp > 1:
        raise ValueError(f"the source layout {layout} has CP={layout.cp}: use CP 1 in modules that send")
    return tuple(
        _tp_shards(ranks, n)
        if layout.sequence_parallel and layout.tp > 1
        else (Group(ranks, intervals.whole(n)),)
        for ranks, n in zip(layout.lanes(layout.pp - 1), rows, strict=True)
    )


def _tp_shards(ranks: tuple[int, ...], rows: int) -> tuple[Group, ...]:
    if rows % len(ranks):
        raise ValueError(
            f"{rows} rows of a source lane do not divide among TP={len(ranks)} for sequence parallelism: pad "
            "the rows, or gather the output"
        )
    return tuple(
        Group((rank,), part)
        for rank, part in zip(ranks, intervals.parts(intervals.whole(rows), len(ranks)), strict=True)
    )


def receiving(
    layout: Layout, rows: Sequence[int], wants: Sequence[Sequence[Intervals]] | None = None
) -> Side:
    """The receiving side: the first pipeline stage of a module.

    Args:
        layout: of the module.
        rows: number of rows of each lane.
        wants: for each lane, the rows of each rank (`slices_of`); None: every rank wants all rows.

    Raises:
        ValueError: the module has context parallelism and `wants` is None.
    """
    lanes = layout.lanes(0)
    if wants is None:
        if layout.cp > 1:
            raise ValueError(
                f"the destination layout {layout} has CP={layout.cp}, so the rows of a context rank depend "
                "on their positions: give them (RowFeed)"
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
        source, destination: layouts of the sending and the receiving module.
        rows: number of rows of each sample of the microbatch, over all lanes.
        row_bytes: bytes of a row.
        wants: rows that each rank needs, from `slices_of`; None: all rows of its lane.
        mode: None: "copies" if the layouts share ranks, else "once".

    Raises:
        ValueError: as `segments`, `sample_shares`, `sending`, `receiving`.
    """
    given, taken = sample_shares(len(rows), source.dp), sample_shares(len(rows), destination.dp)
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
        layout: of the module.
        runs: for each sample, the positions of its rows (`partition.Runs`).
        lengths: for each sample, the length of its sequence, padding included.
        samples: for each lane, its samples; None: equal shares in order.
        documents: for each sample, `cu_seqlens_padded` if it is packed, else ().

    Raises:
        ValueError: as `partition.positions`; or a row lies outside its sequence.
    """
    taken = sample_shares(len(runs), layout.dp) if samples is None else samples
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
