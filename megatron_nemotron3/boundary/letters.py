"""What crosses between two ranks at once: messages of several legs, as one buffer if they are small."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_nemotron3.boundary.pack import pack, place, unpack
from megatron_nemotron3.boundary.transfer import Message, Plan

#: Messages between two ranks cross as one if they are shorter together.
COALESCE_BYTES = 64 * 1024
#: Of the start of each message in a common one.
_ALIGNMENT = 16


class Leg(NamedTuple):
    """One plan of an exchange, as one rank sees it.

    plan: what crosses.
    rows: [plan.rows_held(rank), *row], contiguous, on a rank of the side that gives; else None.
    receives: whether the rank is of the side that takes, be it no rows.
    row: shape of a row.
    dtype: of the rows.
    name: for messages about it: "images, forward, microbatch 3".
    """

    plan: Plan
    rows: Tensor | None
    receives: bool
    row: tuple[int, ...]
    dtype: torch.dtype
    name: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row) * self.dtype.itemsize

    def tag(self) -> int:
        """What a rank believes about the leg, in 24 bits."""
        plan = self.plan
        belief = (self.name, self.row, str(self.dtype), plan.segments, plan.holders, plan.wanters)
        return zlib.crc32(repr(belief).encode()) & 0xFFFFFF


class Letter(NamedTuple):
    """Messages between this rank and another that cross together, and the buffer that does."""

    legs: tuple[int, ...]
    messages: tuple[Message, ...]
    buffer: Tensor
    common: bool


def letters(
    legs: Sequence[Leg],
    messages: list[tuple[int, Message]],
    device: torch.device,
    into: list[Tensor | None] | None = None,
) -> list[Letter]:
    """What crosses between this rank and one other in one direction; `into`: this rank receives it."""
    sizes = [_aligned(message.rows * legs[number].row_bytes) for number, message in messages]
    if len(messages) > 1 and sum(sizes) <= COALESCE_BYTES:
        common = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        letter = Letter(tuple(n for n, _ in messages), tuple(m for _, m in messages), common, True)
        if into is None:
            for number, message, part in _parts(letter, legs):
                pack(_rows(legs[number]), message.pieces, part)
        return [letter]
    found = []
    for number, message in messages:
        if into is None:
            buffer = pack(_rows(legs[number]), message.pieces)
        else:
            target = into[number]
            assert target is not None
            whole = place(message.pieces, target)
            buffer = target.new_empty(message.rows, *legs[number].row) if whole is None else whole
        found.append(Letter((number,), (message,), buffer, False))
    return found


def _rows(leg: Leg) -> Tensor:
    assert leg.rows is not None
    return leg.rows


def _parts(letter: Letter, legs: Sequence[Leg]) -> list[tuple[int, Message, Tensor]]:
    """The messages of a common buffer and where they lie in it, as rows."""
    found, start = [], 0
    for number, message in zip(letter.legs, letter.messages, strict=True):
        leg = legs[number]
        size = message.rows * leg.row_bytes
        part = letter.buffer.narrow(0, start, size).view(leg.dtype).view(message.rows, *leg.row)
        found.append((number, message, part))
        start += _aligned(size)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def open_letter(letter: Letter, legs: Sequence[Leg], buffers: list[Tensor | None]) -> None:
    """Rows that arrived to their places, where they did not arrive there."""
    for number, message, part in (
        _parts(letter, legs) if letter.common else [(letter.legs[0], letter.messages[0], letter.buffer)]
    ):
        target = buffers[number]
        assert target is not None
        if letter.common or place(message.pieces, target) is None:
            unpack(part, message.pieces, target)


def tag_of(letter: Letter, tags: list[int]) -> int:
    """Of a letter: what was believed of all its legs."""
    return zlib.crc32(repr([tags[number] for number in letter.legs]).encode()) & 0x7FFFFFFF
