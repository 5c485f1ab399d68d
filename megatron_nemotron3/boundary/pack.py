"""Rows between a tensor and the contiguous buffers that cross: views where contiguous, else one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_nemotron3.boundary.transfer import Piece


def pack(rows: Tensor, pieces: Sequence[Piece], out: Tensor | None = None) -> Tensor:
    """The rows of a message, in its order.

    Args:
        rows: [n, ...], contiguous; the sender's buffer.
        out: [sum of the pieces' rows, ...] to write to.

    Returns: a view of `rows` if the message is one piece and there is no `out`.
    """
    views = [rows.narrow(0, piece.sent, piece.rows) for piece in pieces]
    if out is not None:
        for view, part in zip(views, split(out, pieces), strict=True):
            part.copy_(view)
        return out
    return views[0] if len(views) == 1 else torch.cat(views)


def place(pieces: Sequence[Piece], buffer: Tensor) -> Tensor | None:
    """The part of the receiver's buffer [m, ...] that a message fills, if it is one: receive into it."""
    first, last = pieces[0], pieces[-1]
    total = sum(piece.rows for piece in pieces)
    if last.received + last.rows - first.received != total:
        return None
    return buffer.narrow(0, first.received, total)


def unpack(message: Tensor, pieces: Sequence[Piece], buffer: Tensor) -> None:
    """Rows of a message [k, ...] to their places in the receiver's buffer [m, ...]."""
    for piece, part in zip(pieces, split(message, pieces), strict=True):
        buffer.narrow(0, piece.received, piece.rows).copy_(part)


def copy(pieces: Sequence[Piece], rows: Tensor, buffer: Tensor) -> None:
    """What a rank sends itself: from its sender's buffer [n, ...] to its receiver's [m, ...]."""
    for sent, received, number in pieces:
        buffer.narrow(0, received, number).copy_(rows.narrow(0, sent, number))


def split(message: Tensor, pieces: Sequence[Piece]) -> Iterator[Tensor]:
    """Views of a message, one for each piece."""
    start = 0
    for piece in pieces:
        yield message.narrow(0, start, piece.rows)
        start += piece.rows
