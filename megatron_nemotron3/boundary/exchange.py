"""Runs plans: every message of every modality and both directions in one batch, then the gathers.

All ranks that run an exchange give the same legs in the same order; from that, and the plans, each knows what
the others send. Messages between two ranks that are small together cross as one. A digest of what a rank
believes about a leg is the message's tag: on gloo, ranks that count rows differently time out instead of
taking each other's rows for their own (NCCL has no tags).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.letters import Leg, letters, open_letter, tag_of
from megatron_nemotron3.boundary.pack import copy
from megatron_nemotron3.boundary.transfer import Gather, Message


class Pending:
    """Sends that were not waited for. Their buffers live as long as this object has them."""

    def __init__(self) -> None:
        self._sends: list[tuple[list[Any], list[Tensor]]] = []

    def keep(self, works: list[Any], buffers: list[Tensor]) -> None:
        """Until `wait`."""
        self._sends.append((works, buffers))

    def drop(self) -> None:
        """Forget them: what waits for them fails."""
        self._sends = []

    def wait(self) -> None:
        """On gloo until the rows have left; on NCCL until the stream is behind them."""
        sends, self._sends = self._sends, []
        for works, _ in sends:
            for work in works:
                work.wait()


def exchange(
    legs: Sequence[Leg],
    groups: Groups,
    failure: Failure,
    pending: Pending | None = None,
    device: torch.device | None = None,
) -> list[Tensor | None]:
    """Run the plans of all legs.

    Args:
        legs: the same ones in the same order on every rank of the hub.
        pending: takes the sends of an exchange in which this rank receives nothing; None: wait for them.
        device: of received rows; None: the groups' device.

    Returns: for each leg [plan.rows_wanted(rank), *row], or None on a rank that does not take rows.

    Raises:
        BoundaryError: the same on every rank: rows that are not those of the plan, or a peer that is gone.
    """
    failure.check()
    for leg in legs:
        _verify(leg, groups.rank, failure)
    with failure.guarded(lambda: f"waited for {', '.join(_describe(leg, groups.rank) for leg in legs)}"):
        if pending is not None:
            pending.wait()
        buffers = [_buffer(leg, groups.rank, device or groups.device) for leg in legs]
        _messages(legs, buffers, groups, pending)
        return [_gathered(leg, buffer, groups) for leg, buffer in zip(legs, buffers, strict=True)]


def _verify(leg: Leg, rank: int, failure: Failure) -> None:
    held = leg.plan.rows_held(rank)
    if leg.rows is None:
        if held:
            failure.fail(f"{leg.name}: the plan has {held} rows of this rank, which gives none")
        return
    if leg.rows.dtype != leg.dtype:
        failure.fail(
            f"{leg.name}: rows are {leg.rows.dtype}, agreed is {leg.dtype}: set config.pipeline_dtype to the "
            "dtype of the encoders' output, or cast it"
        )
    if leg.rows.shape[1:] != leg.row:
        failure.fail(
            f"{leg.name}: rows of shape {tuple(leg.rows.shape[1:])}, agreed is {leg.row}: encoders must "
            "project to the language model's hidden size"
        )
    if leg.rows.shape[0] != held:
        failure.fail(
            f"{leg.name}: {leg.rows.shape[0]} rows, but the row counts of the batch say {held}: the "
            "description of a batch must count the rows that the encoder makes of it"
        )


def _describe(leg: Leg, rank: int) -> str:
    plan = leg.plan
    sends = {m.destination: m.rows for m in plan.sends(rank) if m.destination != rank}
    receives = {m.source: m.rows for m in plan.receives(rank) if m.source != rank}
    return f"{leg.name} (rows to ranks {sends}, from ranks {receives})"


def _buffer(leg: Leg, rank: int, device: torch.device) -> Tensor | None:
    """Where the leg's rows arrive, with room for the gather."""
    if not leg.receives:
        return None
    gather = leg.plan.gather(rank)
    rows = leg.plan.rows_wanted(rank) if gather is None else max(gather.rows, _room(gather))
    return torch.empty(rows, *leg.row, dtype=leg.dtype, device=device)


def _room(gather: Gather) -> int:
    """Rows of a buffer in which every rank of the group has a part."""
    return gather.rows if gather.part == gather.rows else gather.part * len(gather.ranks)


def _messages(
    legs: Sequence[Leg], buffers: list[Tensor | None], groups: Groups, pending: Pending | None
) -> None:
    rank = groups.rank
    sent: dict[int, list[tuple[int, Message]]] = {}
    received: dict[int, list[tuple[int, Message]]] = {}
    for number, leg in enumerate(legs):
        for message in leg.plan.sends(rank):
            sent.setdefault(message.destination, []).append((number, message))
        for message in leg.plan.receives(rank):
            received.setdefault(message.source, []).append((number, message))
    for number, message in sent.pop(rank, ()):
        rows, buffer = legs[number].rows, buffers[number]
        assert rows is not None and buffer is not None
        copy(message.pieces, rows, buffer)
    received.pop(rank, None)
    tags = [leg.tag() for leg in legs]
    outgoing = {peer: letters(legs, messages, groups.device) for peer, messages in sent.items()}
    incoming = {peer: letters(legs, messages, groups.device, buffers) for peer, messages in received.items()}
    # One order for all ranks: pair by pair, the lower rank of a pair first, then the higher one.
    operations = [
        dist.P2POp(operation, letter.buffer, peer, groups.hub, tag_of(letter, tags))
        for peer in sorted({*outgoing, *incoming}, key=lambda peer: (min(rank, peer), max(rank, peer)))
        for operation, letter in itertools.chain(
            ((dist.isend, letter) for letter in outgoing.get(peer, ())),
            ((dist.irecv, letter) for letter in incoming.get(peer, ())),
        )
    ]
    if not operations:
        return
    works = dist.batch_isend_irecv(operations)
    operations.clear()
    if pending is not None and not incoming:
        pending.keep(works, [letter.buffer for sent_to in outgoing.values() for letter in sent_to])
        return
    for work in works:
        work.wait()
    for letter in itertools.chain.from_iterable(incoming.values()):
        open_letter(letter, legs, buffers)


def _gathered(leg: Leg, buffer: Tensor | None, groups: Groups) -> Tensor | None:
    gather = leg.plan.gather(groups.rank)
    if buffer is None or gather is None:
        return buffer
    ranks, rows, part = gather
    if part == rows:
        dist.broadcast(buffer, src=ranks[0], group=groups.gather(ranks))
        return buffer
    mine = buffer.narrow(0, ranks.index(groups.rank) * part, part)
    dist.all_gather_into_tensor(buffer, mine, group=groups.gather(ranks))
    return buffer.narrow(0, 0, rows)
