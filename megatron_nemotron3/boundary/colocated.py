"""Rows between modules that share ranks: upstream's `ColocatedBridgeCommunicator` for any two layouts.

The plans, of mode "copies", say which rows each rank lacks; one all-to-all moves exactly those, forward and
backward. Lanes may be ragged or empty, and the receiving module may have pipeline stages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection, ColocatedBridgeCommunicator
from torch import Tensor

from megatron_nemotron3.boundary.agreement import (
    SPLIT_SIZES,
    UNKNOWN,
    Announcement,
    RowsError,
    agree,
    share_counts,
)
from megatron_nemotron3.boundary.exchange import Indexed, RowKind, contiguous, copy, messages_by_peer
from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.groups import Failure, Groups
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import TransferPlan


class ColocatedBridge(ColocatedBridgeCommunicator):
    """Rows from an encoder to the language model on the same ranks.

    Every rank of the world constructs it, in one order, because process groups are created.

    Args:
        src_grid, dest_grid, src_module_name, dest_module_name, dim_mapping: as upstream. Row counts of a
            `Microbatch` are looked up under `src_module_name`.
        sequence_parallel: whether the destination uses `--sequence-parallel`.
        source_sequence_parallel: whether the source's rows are split over its TP; needs a feed.
        source_share: how the source's context ranks share its rows (`Layout.share`); needs a feed.
        groups_from: another communicator of the same ranks, whose process group is used; None: a new one.
        timeout: of every wait; None: that of the default group.
    """

    def __init__(
        self,
        src_grid: HyperCommGrid,
        dest_grid: HyperCommGrid,
        src_module_name: str = "src",
        dest_module_name: str = "dest",
        dim_mapping: dict[str, int] | None = None,
        *,
        sequence_parallel: bool = False,
        source_sequence_parallel: bool = False,
        source_share: str = "",
        groups_from: ColocatedBridge | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.dim_mapping = dim_mapping or {"b": 0, "s": 1, "h": 2}
        self.current_rank = dist.get_rank()
        self.source = Layout.from_grid(src_grid, source_sequence_parallel, source_share)
        self.destination = Layout.from_grid(dest_grid, sequence_parallel)
        self._validate_grids()
        self._extract_parallelism_info()
        # Upstream's attributes: rank -> (data lane, tp index).
        self.rank_to_src_pos = _lane_and_tp(self.source)
        self.rank_to_dest_pos = _lane_and_tp(self.destination)
        self._set_direction()
        self._gather_pg: Any = None
        self._destroyed = False
        #: Agreed upon in the first exchange.
        self._kind: RowKind | None = None
        self._owns_groups = groups_from is None
        if groups_from is None:
            self.groups = Groups(self.source.ranks, timeout=timeout)
            self.failure = Failure(self.groups.abort)
        else:
            self.groups, self.failure = groups_from.groups, groups_from.failure
        self._cached_plan = functools.lru_cache(maxsize=32)(self._make_plan)

    def communicate(
        self, tensor: Tensor, microbatch: Microbatch | None = None, *, backward: bool | None = None
    ) -> Tensor:
        """Send the rows of this rank's encoder lane; return those of its language model lane, or slice.

        Args:
            tensor: [rows, h], or three dimensions that are cut along `dim_mapping["b"]`; a sample is then a
                row.
            microbatch: its row counts. None: one header is exchanged, and without upstream's
                `_mimo_bridge_split_sizes` (rows of each sample) a lane's rows are cut into equal parts.
            backward: whether gradients come back, the same on all ranks. None: with a header, whether any
                rank's tensor requires a gradient; else whether this one does.
        """
        return communicate([ModalityRows(self, tensor, backward)], microbatch)[0]

    def _prepare(
        self, modality: ModalityRows, microbatch: Microbatch | None
    ) -> tuple[TransferPlan, Tensor, bool]:
        """The plan, the rows [n, ...], and whether gradients come back."""
        tensor, backward = modality.tensor, modality.backward
        batch = self.dim_mapping["b"] if tensor.ndim != 2 else 0
        rows = tensor.movedim(batch, 0).contiguous()
        kind = RowKind(tuple(rows.shape[1:]), rows.dtype)
        needs_gradient = tensor.requires_grad if backward is None else backward
        if microbatch is None or self._kind is None:
            counts, any_needs = self._agree(modality, rows, needs_gradient, microbatch)
            self._kind = kind
            needs_gradient = any_needs if backward is None else backward
            if microbatch is None:
                microbatch = Microbatch.of({self.src_module_name: counts})
        plan = self._cached_plan(microbatch, kind.row_bytes)
        expected = plan.rows_held(self.current_rank)
        if (len(rows), kind) != (expected, self._kind):
            self.failure.fail(
                f"{self.src_module_name} gave {_kind_text(len(rows), kind)}, expected were "
                f"{_kind_text(expected, self._kind)}: the counts of the feed and the encoder's input must be "
                "of the same samples, and all lanes of one dtype and width"
            )
        return plan, rows, needs_gradient

    def _agree(
        self, modality: ModalityRows, rows: Tensor, needs_gradient: bool, microbatch: Microbatch | None
    ) -> tuple[tuple[int, ...], bool]:
        """Exchange headers: rows of each share of the samples, and whether any rank requires a gradient."""
        name, sizes = self.src_module_name, getattr(modality.tensor, SPLIT_SIZES, None)
        total_shares = math.lcm(self.source.dp, self.destination.dp)
        source_shares, shares = total_shares // self.source.dp, total_shares // self.destination.dp
        sharded = self.source.sliced
        described = None
        if microbatch is not None:
            described = dict(microbatch.rows).get(name, ()), microbatch
        elif sharded:
            raise RowsError(
                f"rows of {name} are split over TP={self.source.tp} or CP={self.source.cp}: give the row "
                "counts (RowFeed)"
            )
        if sizes is not None and sum(sizes) != len(rows):
            sizes = None
        marked = modality.marked
        announcement = Announcement(
            name,
            senders=self.source.lanes(0),
            shares=source_shares,
            rows=rows,
            counts=_share_counts_if_known(len(rows), source_shares, sizes),
            sharded=sharded,
            described=described,
            needs_gradient=needs_gradient,
            receivers=self.destination.lanes(0),
            expected=None if marked is None else _share_counts_if_known(sum(marked), shares, marked),
            expected_shares=shares,
        )
        (found,) = agree([announcement], self.groups, self.failure)
        counts: list[int] = []
        for lane, total in enumerate(found.lane_rows if microbatch is None else ()):
            own = slice(lane * source_shares, (lane + 1) * source_shares)
            if UNKNOWN not in found.expected:
                if sum(found.expected[own]) != total:
                    raise RowsError(
                        f"lane {lane} of {name} gave {total} rows, but input_ids have "
                        f"{sum(found.expected[own])} positions for them: encoder input and input_ids must be "
                        "of the same samples"
                    )
                counts += found.expected[own]
            elif UNKNOWN in found.counts[own]:
                raise RowsError(
                    f"lane {lane} of {name}: its batch dim size {total} is not divisible by "
                    f"{self.direction.value} scale={source_shares}: give the rows of each sample (a "
                    f"Microbatch, or {SPLIT_SIZES})"
                )
            else:
                counts += found.counts[own]
        return tuple(counts), found.needs_gradient

    def _make_plan(self, microbatch: Microbatch, row_bytes: int) -> TransferPlan:
        name, known = self.src_module_name, dict(microbatch.rows)
        if name not in known:
            raise ValueError(
                f"the feed describes {sorted(known)}, but not {name!r}: its `describe` must include it"
            )
        return microbatch.plan(name, self.source, self.destination, known[name], row_bytes)

    def _validate_grids(self) -> None:
        src, dest = self.src_grid, self.dest_grid
        if src.size != dest.size:
            raise ValueError(f"Grids must span same number of ranks: src={src.size}, dest={dest.size}")
        if src.rank_offset != dest.rank_offset:
            raise ValueError(f"Grids must have same rank offset: {src.rank_offset} and {dest.rank_offset}")
        for side, grid in (("src", src), ("dest", dest)):
            for required in ("tp", "dp"):
                if required not in grid.dim_names:
                    raise ValueError(f"{side} grid must have '{required}' dimension, got {grid.dim_names}")
        if self.source.pp != 1:
            raise ValueError(f"src PP must be 1 for modules that share ranks, got {self.source.pp}")
        try:
            self.source.check_sender()
        except ValueError as error:  # in upstream's wording
            raise ValueError(
                f"src CP must be 1, or it must be said how its ranks share rows: {error}"
            ) from None

    def _set_direction(self) -> None:
        """Set upstream's attributes, which other code and upstream's tests read; nothing here uses them."""
        src, dest = self.source.dp, self.destination.dp
        self.gather_group_ranks: list[list[int]] = []
        self.scale = max(src, dest) // min(src, dest)
        self.direction = BridgeDirection.EQUAL
        if src > dest:
            self.direction = BridgeDirection.FAN_IN
        elif dest > src:
            self.direction = BridgeDirection.FAN_OUT
        plain = self.destination.cp == self.destination.pp == 1
        if src != dest and max(src, dest) % min(src, dest) == 0 and plain:
            finer, positions = self.destination, self.rank_to_dest_pos
            if src > dest:
                finer, positions = self.source, self.rank_to_src_pos
            self.gather_group_ranks = self._build_gather_groups(
                min(src, dest), finer.tp, self.scale, positions
            )

    @property
    def gather_pg(self) -> Any:
        """Upstream's gather groups. Not needed here; created on all ranks when read."""
        if self._gather_pg is None and self.gather_group_ranks and not self._destroyed:
            self._gather_pg, _ = dist.new_subgroups_by_enumeration(self.gather_group_ranks)
        return self._gather_pg

    def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        if self._gather_pg is not None:
            dist.destroy_process_group(self._gather_pg)
            self._gather_pg = None
        if self._owns_groups:
            self.groups.close()


class ModalityRows(NamedTuple):
    """One modality of an exchange; `tensor`, `backward` as `ColocatedBridge.communicate` takes them.

    marked: without a feed, the number of positions for rows in each sample of this rank's destination lane,
        if known; ragged samples then need no `_mimo_bridge_split_sizes`.
    """

    comm: ColocatedBridge
    tensor: Tensor
    backward: bool | None = None
    marked: Sequence[int] | None = None


def communicate(modalities: Sequence[ModalityRows], microbatch: Microbatch | None = None) -> list[Tensor]:
    """Exchange the rows of several modalities at once."""
    prepared = [modality.comm._prepare(modality, microbatch) for modality in modalities]
    arrived: dict[int, Tensor] = {}
    kinds = [(rows.dtype, rows.shape[1:]) for _, rows, _ in prepared]
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, k in enumerate(kinds) if k == kind]
        plans, rows, back = zip(*(prepared[i] for i in chosen), strict=True)
        comm = modalities[chosen[0]].comm
        # The anchor requires a gradient, so each rank takes part in backward, whatever it sent.
        anchor = torch.empty(0, requires_grad=any(back))
        out = AllToAll.apply(comm.groups, comm.failure, plans, back, anchor, *rows)
        arrived |= dict(zip(chosen, out, strict=True))
    return [
        arrived[i].movedim(0, m.comm.dim_mapping["b"]).contiguous() if arrived[i].ndim != 2 else arrived[i]
        for i, m in enumerate(modalities)
    ]


def _share_counts_if_known(rows: int, shares: int, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    try:
        return share_counts(rows, shares, sizes, uneven=False)
    except ValueError:
        return None


def _kind_text(rows: int, kind: RowKind | None) -> str:
    assert kind is not None
    return f"{rows} rows of {list(kind.row)} in {kind.dtype}"


def _lane_and_tp(layout: Layout) -> dict[int, tuple[int, int]]:
    return {rank: (layout.lane_of(rank), layout.coordinates(rank)["tp"]) for rank in layout.ranks}


def deliver(plans: Sequence[TransferPlan], held: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """For each plan contiguous rows [held, ...] -> [wanted, ...]: a view if this rank holds all of them."""
    sends, receives, own = messages_by_peer(plans, groups.rank)
    to_itself = dict(own)
    wanted = []
    for index, (plan, rows) in enumerate(zip(plans, held, strict=True)):
        size, message = plan.rows_wanted(groups.rank), to_itself.get(index)
        if message and len(message.pieces) == 1 and message.rows == size:
            wanted.append(rows if len(rows) == size else rows.narrow(0, message.pieces[0].sent, size))
            continue
        wanted.append(rows.new_empty(size, *rows.shape[1:]))
        if message:
            copy(message.pieces, rows, wanted[index])
    # Plans are the same on all ranks, so all ranks skip the collective or none.
    if any(message.source != message.destination for plan in plans for message in plan.messages):
        _all_to_all(sends, receives, held, wanted, groups)
    return wanted


def _all_to_all(
    sends: Mapping[int, list[Indexed]],
    receives: Mapping[int, list[Indexed]],
    held: Sequence[Tensor],
    wanted: Sequence[Tensor],
    groups: Groups,
) -> None:
    out_splits = [sum(message.rows for _, message in sends.get(peer, ())) for peer in groups.ranks]
    in_splits = [sum(message.rows for _, message in receives.get(peer, ())) for peer in groups.ranks]
    leaving = [entry for peer in groups.ranks for entry in sends.get(peer, ())]
    coming = [entry for peer in groups.ranks for entry in receives.get(peer, ())]
    sent = [(index, piece.sent, piece.rows) for index, message in leaving for piece in message.pieces]
    places = [(index, piece.received, piece.rows) for index, message in coming for piece in message.pieces]
    outgoing = contiguous(held, sent)
    if outgoing is None:
        nothing = held[0].narrow(0, 0, 0)
        outgoing = torch.cat([nothing, *(held[index].narrow(0, at, rows) for index, at, rows in sent)])
    direct = contiguous(wanted, places)
    incoming = outgoing.new_empty(sum(in_splits), *outgoing.shape[1:]) if direct is None else direct
    dist.all_to_all_single(incoming, outgoing, in_splits, out_splits, group=groups.group)
    if direct is None:
        parts = incoming.split([rows for _, _, rows in places])
        for (index, at, rows), part in zip(places, parts, strict=True):
            wanted[index].narrow(0, at, rows).copy_(part)


class AllToAll(torch.autograd.Function):
    """Send rows forward and gradients back, all modalities together."""

    @staticmethod
    def forward(
        ctx: Any,
        groups: Groups,
        failure: Failure,
        plans: Sequence[TransferPlan],
        back: Sequence[bool],
        anchor: Tensor,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.groups, ctx.failure, ctx.plans, ctx.back = groups, failure, plans, back
        with failure.guarded(lambda: _all_to_all_text(plans, groups.rank, "rows")):
            arrived = tuple(deliver(plans, rows, groups))
        ctx.mark_non_differentiable(*(out for out, need in zip(arrived, back, strict=True) if not need))
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chosen = [i for i, need in enumerate(ctx.back) if need]
        plans = [ctx.plans[i].backward for i in chosen]
        with ctx.failure.guarded(lambda: _all_to_all_text(plans, ctx.groups.rank, "gradients of rows")):
            returned = deliver(plans, [grads[i].contiguous() for i in chosen], ctx.groups)
        by_plan = dict(zip(chosen, returned, strict=True))
        return None, None, None, None, None, *(by_plan.get(i) for i in range(len(ctx.back)))


def _all_to_all_text(plans: Sequence[TransferPlan], rank: int, what: str) -> str:
    held = [plan.rows_held(rank) for plan in plans]
    wanted = [plan.rows_wanted(rank) for plan in plans]
    return f"all-to-all of {what}: holds {held}, wants {wanted} of each modality"
