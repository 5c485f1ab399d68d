"""Plans of mode "copies" on ranks that both modules share: what stays is copied, the rest one all-to-all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.pack import copy, pack, unpack
from megatron_nemotron3.boundary.transfer import Message, Plan

#: (index of the plan, message).
Indexed = tuple[int, Message]


def crosses(plans: Iterable[Plan]) -> bool:
    """Whether any row leaves its rank. The same on all ranks, for plans are."""
    return any(message.source != message.destination for plan in plans for message in plan.messages)


def deliver(plans: Sequence[Plan], held: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """Rows of several modalities to those who want them, together.

    Args:
        held: of each plan, the buffer [rows held, ...] of this rank, contiguous; one dtype and one shape of a
            row.
        groups: their hub is all ranks of the plans; used only where a row leaves its rank.

    Returns: of each plan, [rows wanted, ...]; a view of `held` where nothing else is wanted.
    """
    rank = groups.rank
    own = [next((m for m in plan.sends(rank) if m.destination == rank), None) for plan in plans]
    views = [
        _whole(message, rows, plan.rows_wanted(rank))
        for message, rows, plan in zip(own, held, plans, strict=True)
    ]
    wanted = [
        rows.new_empty(plan.rows_wanted(rank), *rows.shape[1:]) if view is None else view
        for view, rows, plan in zip(views, held, plans, strict=True)
    ]
    for view, message, rows, out in zip(views, own, held, wanted, strict=True):
        if view is None and message:
            copy(message.pieces, rows, out)
    if crosses(plans):
        _exchange(plans, held, wanted, groups)
    return wanted


def _whole(message: Message | None, rows: Tensor, wanted: int) -> Tensor | None:
    """The part of `rows` that is all this rank wants, if it lies together."""
    if message and len(message.pieces) == 1 and message.rows == wanted:
        return rows if len(rows) == wanted else rows.narrow(0, message.pieces[0].sent, wanted)
    return None


def _exchange(
    plans: Sequence[Plan], held: Sequence[Tensor], wanted: Sequence[Tensor], groups: Groups
) -> None:
    rank, peers = groups.rank, groups.ranks
    sends: dict[int, list[Indexed]] = {peer: [] for peer in peers}
    receives: dict[int, list[Indexed]] = {peer: [] for peer in peers}
    for index, plan in enumerate(plans):
        for message in plan.sends(rank):
            if message.destination != rank:
                sends[message.destination].append((index, message))
        for message in plan.receives(rank):
            if message.source != rank:
                receives[message.source].append((index, message))
    out_splits = [sum(message.rows for _, message in sends[peer]) for peer in peers]
    in_splits = [sum(message.rows for _, message in receives[peer]) for peer in peers]
    leaving = [entry for peer in peers for entry in sends[peer]]
    coming = [entry for peer in peers for entry in receives[peer]]
    outgoing = _packed(leaving, held, sum(out_splits))
    direct = _direct(coming, wanted)
    incoming = outgoing.new_empty(sum(in_splits), *outgoing.shape[1:]) if direct is None else direct
    dist.all_to_all_single(incoming, outgoing, in_splits, out_splits, group=groups.hub)
    if direct is None:
        start = 0
        for index, message in coming:
            unpack(incoming.narrow(0, start, message.rows), message.pieces, wanted[index])
            start += message.rows


def _packed(leaving: Sequence[Indexed], held: Sequence[Tensor], total: int) -> Tensor:
    """All messages one after the other; the buffer itself where they lie so."""
    spans = [(index, piece.sent, piece.rows) for index, message in leaving for piece in message.pieces]
    if together := _together(spans):
        index, start = together
        return held[index].narrow(0, start, total)
    out = torch.empty(total, *held[0].shape[1:], dtype=held[0].dtype, device=held[0].device)
    start = 0
    for index, message in leaving:
        pack(held[index], message.pieces, out.narrow(0, start, message.rows))
        start += message.rows
    return out


def _direct(coming: Sequence[Indexed], wanted: Sequence[Tensor]) -> Tensor | None:
    """Where all messages can be received without a copy."""
    spans = [(index, piece.received, piece.rows) for index, message in coming for piece in message.pieces]
    if together := _together(spans):
        index, start = together
        return wanted[index].narrow(0, start, sum(rows for _, _, rows in spans))
    return None


def _together(spans: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """(buffer, first row) if (buffer, row, rows) follow each other in one buffer."""
    if not spans:
        return None
    at = spans[0][:2]
    for index, start, rows in spans:
        if (index, start) != at:
            return None
        at = index, start + rows
    return spans[0][:2]
