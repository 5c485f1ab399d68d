"""Carries rows by plans, point to point: all messages of all modalities in one batch, then the gathers.

All ranks of an exchange pass the same transfers in the same order; from those and the plans each rank knows
what the others send. Small messages between two ranks are coalesced into one buffer. The tag of a message is
a digest of the rank's description of the transfer: on gloo, ranks that count rows differently time out
instead of receiving wrong rows. NCCL has no tags: the coordinator of separate ranks compares the digests.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.groups import Failure, Groups
from megatron_nemotron3.boundary.plan import Message, RowPiece, TransferPlan

#: Messages between two ranks are sent as one buffer if they are at most this long together.
COALESCE_BYTES = 64 * 1024
#: Alignment of each message in a coalesced buffer, in bytes.
_ALIGNMENT = 16


class RowKind(NamedTuple):
    """Shape and dtype of a row, as both sides of an edge agreed."""

    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize


class RankTransfer(NamedTuple):
    """One plan of an exchange, as one rank sees it.

    rows: [plan.rows_held(rank), *row], contiguous, on a rank of the sending side; else None.
    receives: whether the rank is of the receiving side, even if it receives no rows.
    name: for error messages: "images -> language, forward 3".
    """

    plan: TransferPlan
    rows: Tensor | None
    receives: bool
    kind: RowKind
    name: str

    def tag(self) -> int:
        row, dtype = self.kind
        description = (self.name, row, str(dtype), self.plan.digest)
        return zlib.crc32(repr(description).encode()) & 0xFFFFFF

    def text(self, rank: int) -> str:
        sends = {m.destination: m.rows for m in self.plan.sends(rank) if m.destination != rank}
        receives = {m.source: m.rows for m in self.plan.receives(rank) if m.source != rank}
        return f"{self.name} (rows to ranks {sends}, from ranks {receives})"


#: (index of the transfer, message).
Indexed = tuple[int, Message]


class Payload(NamedTuple):
    """The buffer of one isend or irecv: one message, or several that are coalesced into bytes."""

    messages: tuple[Indexed, ...]
    buffer: Tensor
    coalesced: bool

    def parts(self, transfers: Sequence[RankTransfer]) -> Iterator[tuple[int, Message, Tensor]]:
        """(index of the transfer, message, its rows in the buffer)."""
        if not self.coalesced:
            yield *self.messages[0], self.buffer
            return
        start = 0
        for index, message in self.messages:
            kind = transfers[index].kind
            size = message.rows * kind.row_bytes
            flat = self.buffer.narrow(0, start, size).view(kind.dtype)
            yield index, message, flat.view(message.rows, *kind.row)
            start += _aligned(size)

    def tag(self, tags: Sequence[int]) -> int:
        return zlib.crc32(repr([tags[index] for index, _ in self.messages]).encode()) & 0x7FFFFFFF


#: Handles and buffers of sends that were not waited for; the buffers must live until then.
Pending = list[tuple[list[Any], list[Tensor]]]


def wait_for(pending: Pending) -> None:
    """Wait until the rows have left (gloo), or make the stream wait for that (NCCL)."""
    sends = pending.copy()
    pending.clear()
    for works, _ in sends:
        for work in works:
            work.wait()


def exchange(
    transfers: Sequence[RankTransfer],
    groups: Groups,
    failure: Failure,
    pending: Pending | None = None,
) -> list[Tensor | None]:
    """For each transfer the rows [plan.rows_wanted(rank), *row]; None on a rank that does not receive.

    pending: holds the sends of an exchange in which this rank receives nothing; None: wait for them.
    """
    failure.check()
    rank = groups.rank
    for transfer in transfers:
        _check_rows(transfer, rank, failure)
    tags = [transfer.tag() if groups.tagged else 0 for transfer in transfers]
    with failure.guarded(lambda: f"waited for {', '.join(transfer.text(rank) for transfer in transfers)}"):
        if pending is not None:
            wait_for(pending)
        buffers = [_room(transfer, rank, groups.device) for transfer in transfers]
        _send_and_receive(transfers, tags, buffers, groups, pending)
        return [_gather_rows(t, buffer, groups) for t, buffer in zip(transfers, buffers, strict=True)]


def _check_rows(transfer: RankTransfer, rank: int, failure: Failure) -> None:
    name, rows, kind = transfer.name, transfer.rows, transfer.kind
    held = transfer.plan.rows_held(rank)
    if rows is None:
        if held:
            failure.fail(f"{name}: the plan has {held} rows of this rank, which gives none")
        return
    if rows.dtype != kind.dtype:
        failure.fail(
            f"{name}: rows are {rows.dtype}, agreed is {kind.dtype}: set config.pipeline_dtype to the "
            "dtype of the encoders' output, or cast it"
        )
    if rows.shape[1:] != kind.row:
        failure.fail(
            f"{name}: rows of shape {tuple(rows.shape[1:])}, agreed is {kind.row}: encoders must project "
            "to the language model's hidden size"
        )
    if rows.shape[0] != held:
        failure.fail(f"{name}: {other_rows(rows.shape[0], held)}")


def other_rows(found: int, described: int) -> str:
    """Text of an error: a rank has another number of rows than the feed describes."""
    return (
        f"{found} rows, but the row counts of the batch say {described}: the description must be of the same "
        "samples and count the rows that the encoder makes of them"
    )


def _room(transfer: RankTransfer, rank: int, device: torch.device) -> Tensor | None:
    """Buffer for the rows that this rank receives, with those that it holds itself in their places."""
    if not transfer.receives:
        return None
    plan = transfer.plan
    rows, gather = plan.rows_wanted(rank), plan.gather(rank)
    own = next((message for message in plan.receives(rank) if message.source == rank), None)
    if own is not None and gather is None and len(own.pieces) == 1 and own.rows == rows:
        return _present(transfer.rows).narrow(0, own.pieces[0].sent, rows)
    if gather is not None and not gather.is_broadcast:  # an all-gather needs equal parts for every rank
        rows = gather.part * len(gather.ranks)
    buffer = torch.empty(rows, *transfer.kind.row, dtype=transfer.kind.dtype, device=device)
    for sent, received, number in own.pieces if own is not None else ():
        buffer.narrow(0, received, number).copy_(_present(transfer.rows).narrow(0, sent, number))
    return buffer


def _send_and_receive(
    transfers: Sequence[RankTransfer],
    tags: Sequence[int],
    buffers: list[Tensor | None],
    groups: Groups,
    pending: Pending | None,
) -> None:
    def packed(index: int, message: Message) -> Tensor:
        return pack(_present(transfers[index].rows), message.pieces)

    def room(index: int, message: Message) -> Tensor:
        target = _present(buffers[index])
        view = view_of(message.pieces, target)
        return target.new_empty(message.rows, *target.shape[1:]) if view is None else view

    rank, device = groups.rank, groups.device
    sent, received = _messages_by_peer([transfer.plan for transfer in transfers], rank)
    outgoing = {peer: _payloads(transfers, messages, device, packed) for peer, messages in sent.items()}
    incoming = {peer: _payloads(transfers, messages, device, room) for peer, messages in received.items()}
    for payload in itertools.chain.from_iterable(outgoing.values()):
        if payload.coalesced:
            for index, message, part in payload.parts(transfers):
                pack(_present(transfers[index].rows), message.pieces, part)
    # One order on all ranks: pair by pair, the lower rank of a pair first, then the higher one.
    operations = [
        dist.P2POp(operation, payload.buffer, peer, groups.group, payload.tag(tags) if groups.tagged else 0)
        for peer in sorted({*outgoing, *incoming}, key=lambda peer: (min(rank, peer), max(rank, peer)))
        for operation, payloads in ((dist.isend, outgoing), (dist.irecv, incoming))
        for payload in payloads.get(peer, ())
    ]
    if not operations:
        return
    works = dist.batch_isend_irecv(operations)
    operations.clear()
    if pending is not None and not incoming:
        pending.append((works, [payload.buffer for payloads in outgoing.values() for payload in payloads]))
        return
    for work in works:
        work.wait()
    for payload in itertools.chain.from_iterable(incoming.values()):
        for index, message, rows in payload.parts(transfers):
            target = _present(buffers[index])
            if payload.coalesced or view_of(message.pieces, target) is None:
                unpack(rows, message.pieces, target)


def _payloads(
    transfers: Sequence[RankTransfer],
    messages: list[Indexed],
    device: torch.device,
    buffer_of: Callable[[int, Message], Tensor],
) -> list[Payload]:
    """One buffer for all messages to a peer, or from it, if they are small; else one for each."""
    size = sum(_aligned(message.rows * transfers[index].kind.row_bytes) for index, message in messages)
    if len(messages) > 1 and size <= COALESCE_BYTES:
        return [Payload(tuple(messages), torch.empty(size, dtype=torch.uint8, device=device), True)]
    return [Payload(((index, message),), buffer_of(index, message), False) for index, message in messages]


def _messages_by_peer(
    plans: Sequence[TransferPlan], rank: int
) -> tuple[dict[int, list[Indexed]], dict[int, list[Indexed]]]:
    """Messages of several plans that a rank sends to others and receives from them, by peer."""
    sent: dict[int, list[Indexed]] = defaultdict(list)
    received: dict[int, list[Indexed]] = defaultdict(list)
    for index, plan in enumerate(plans):
        for message in plan.sends(rank):
            sent[message.destination].append((index, message))
        for message in plan.receives(rank):
            received[message.source].append((index, message))
    for by_peer in (sent, received):
        by_peer.pop(rank, None)
    return sent, received


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _gather_rows(transfer: RankTransfer, buffer: Tensor | None, groups: Groups) -> Tensor | None:
    gather = transfer.plan.gather(groups.rank)
    if buffer is None or gather is None:
        return buffer
    ranks, rows, part = gather
    if gather.is_broadcast:
        dist.broadcast(buffer, src=ranks[0], group=groups.gather(ranks))
        return buffer
    mine = buffer.narrow(0, ranks.index(groups.rank) * part, part)
    dist.all_gather_into_tensor(buffer, mine, group=groups.gather(ranks))
    return buffer.narrow(0, 0, rows)


def pack(rows: Tensor, pieces: Sequence[RowPiece], out: Tensor | None = None) -> Tensor:
    """The sender's contiguous rows [n, ...] -> those of a message; a view of a single piece without `out`.

    With `out` the rows are detached: torch.cat does not write into a buffer what needs a gradient.
    """
    views = [rows.narrow(0, piece.sent, piece.rows) for piece in pieces]
    return views[0] if len(views) == 1 and out is None else torch.cat(views, out=out)


def unpack(message: Tensor, pieces: Sequence[RowPiece], buffer: Tensor) -> None:
    """Copy the rows of a message [k, ...] to their places in the receiver's buffer [m, ...]."""
    for piece, part in zip(pieces, message.split([piece.rows for piece in pieces]), strict=True):
        buffer.narrow(0, piece.received, piece.rows).copy_(part)


def view_of(pieces: Sequence[RowPiece], buffer: Tensor) -> Tensor | None:
    """The part of the receiver's buffer [m, ...] that a message fills, or None if it is not contiguous."""
    at = first = pieces[0].received
    for piece in pieces:
        if piece.received != at:
            return None
        at += piece.rows
    return buffer.narrow(0, first, at - first)
