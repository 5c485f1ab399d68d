"""A checksum of a tensor that adds up from its parts, so that both sides compute it on what they hold.

The sum over all elements of bits * R(i) * C(j) modulo 2**64, for an element in row i of the first axis and
place j of the others in the whole tensor; R and C are odd pseudo-random numbers. A changed element always
shows, and swapped rows, columns or experts do but for a chance of the order of 2**-60. It is a proof against
mistakes, not against an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements per step, which bounds the memory of the integers.
_BLOCK = 1 << 20
_COLUMNS = 1 << 40
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(part: Tensor, axis: int = 0, start: int = 0) -> int:
    """Sum of a part of a tensor, from index `start` of `axis` on; the default is the whole tensor.

    Sums of disjoint parts add up modulo 2**64 to that of the whole.
    """
    rows = part.detach().reshape(part.shape[0], -1).contiguous()
    columns = _factors(start if axis == 1 else 0, rows.shape[1], _COLUMNS, rows.device)
    first = start if axis == 0 else 0
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for begin in range(0, len(rows), step):
        bits = rows[begin : begin + step].view(_BITS[rows.element_size()]).long()
        total += ((bits * columns).sum(1) * _factors(first + begin, len(bits), 0, rows.device)).sum()
    return int(total)


def _factors(first: int, number: int, stream: int, device: torch.device) -> Tensor:
    """Odd numbers that belong to the indices from `first` on (SplitMix64)."""
    x = torch.arange(first, first + number, dtype=torch.int64, device=device) + (stream + 1)
    x = x * -7046029254386353131
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def added(one: int, other: int) -> int:
    """Sum of two checksums."""
    return (one + other + (1 << 63)) % (1 << 64) - (1 << 63)
