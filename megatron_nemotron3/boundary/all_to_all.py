"""Executes the plans of modules that share ranks: local copies, and one all-to-all for the rest.

The plans have mode "copies". `AllToAll` does this in autograd: gradients go back by the backward plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.exchange import Indexed, copy, messages_by_peer, pack, unpack
from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.plan import Message, TransferPlan


def deliver(plans: Sequence[TransferPlan], held: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """For each plan contiguous rows [held, ...] -> [wanted, ...]: a view if this rank holds all of them."""
    rank = groups.rank
    own = [next((m for m in plan.sends(rank) if m.destination == rank), None) for plan in plans]
    views = [
        _view_if_contiguous(message, rows, plan.rows_wanted(rank))
        for message, rows, plan in zip(own, held, plans, strict=True)
    ]
    wanted = [
        rows.new_empty(plan.rows_wanted(rank), *rows.shape[1:]) if view is None else view
        for view, rows, plan in zip(views, held, plans, strict=True)
    ]
    for view, message, rows, out in zip(views, own, held, wanted, strict=True):
        if view is None and message:
            copy(message.pieces, rows, out)
    # Plans are the same on all ranks, so all ranks skip the collective or none.
    if any(message.source != message.destination for plan in plans for message in plan.messages):
        _all_to_all(plans, held, wanted, groups)
    return wanted


def _view_if_contiguous(message: Message | None, rows: Tensor, wanted: int) -> Tensor | None:
    """The part of `rows` that is all this rank wants, if it is contiguous."""
    if message and len(message.pieces) == 1 and message.rows == wanted:
        return rows if len(rows) == wanted else rows.narrow(0, message.pieces[0].sent, wanted)
    return None


def _all_to_all(
    plans: Sequence[TransferPlan], held: Sequence[Tensor], wanted: Sequence[Tensor], groups: Groups
) -> None:
    sends, receives, _ = messages_by_peer(plans, groups.rank)
    out_splits = [sum(message.rows for _, message in sends.get(peer, ())) for peer in groups.ranks]
    in_splits = [sum(message.rows for _, message in receives.get(peer, ())) for peer in groups.ranks]
    leaving = [entry for peer in groups.ranks for entry in sends.get(peer, ())]
    coming = [entry for peer in groups.ranks for entry in receives.get(peer, ())]
    outgoing = _send_buffer(leaving, held, sum(out_splits))
    direct = _receive_buffer(coming, wanted)
    incoming = outgoing.new_empty(sum(in_splits), *outgoing.shape[1:]) if direct is None else direct
    dist.all_to_all_single(incoming, outgoing, in_splits, out_splits, group=groups.group)
    if direct is None:
        start = 0
        for index, message in coming:
            unpack(incoming.narrow(0, start, message.rows), message.pieces, wanted[index])
            start += message.rows


def _send_buffer(leaving: Sequence[Indexed], held: Sequence[Tensor], total: int) -> Tensor:
    """All messages one after the other; a view if they are contiguous in one buffer."""
    blocks = [(index, piece.sent, piece.rows) for index, message in leaving for piece in message.pieces]
    if run := _contiguous_run(blocks):
        index, start = run
        return held[index].narrow(0, start, total)
    out = torch.empty(total, *held[0].shape[1:], dtype=held[0].dtype, device=held[0].device)
    start = 0
    for index, message in leaving:
        pack(held[index], message.pieces, out.narrow(0, start, message.rows))
        start += message.rows
    return out


def _receive_buffer(coming: Sequence[Indexed], wanted: Sequence[Tensor]) -> Tensor | None:
    """The part of a buffer into which all messages can be received without a copy, or None."""
    blocks = [(index, piece.received, piece.rows) for index, message in coming for piece in message.pieces]
    if run := _contiguous_run(blocks):
        index, start = run
        return wanted[index].narrow(0, start, sum(rows for _, _, rows in blocks))
    return None


def _contiguous_run(blocks: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """(buffer, first row) if the blocks (buffer, row, rows) are contiguous in one buffer, else None."""
    if not blocks:
        return None
    at = blocks[0][:2]
    for index, start, rows in blocks:
        if (index, start) != at:
            return None
        at = index, start + rows
    return blocks[0][:2]


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
