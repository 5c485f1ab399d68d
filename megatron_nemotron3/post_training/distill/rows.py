"""Rows whose tokens context-parallel ranks share, and the borders of documents packed into them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import cu_seqlens, zigzag


def borders_of(packed: Any, length: int) -> tuple[Tensor | None, list[int]]:
    """Borders of the documents of a row of `length` tokens."""
    borders = None if packed is None else cu_seqlens(packed).cpu()
    ends = [0] if borders is None else borders.tolist()
    return borders, ends + ([length] if ends[-1] < length else [])


def all_gathered(mine: Tensor, group: Any) -> list[Tensor]:
    """The tensor of each rank of a group; all have one shape."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return parts


def gathered(mine: Tensor, ends: list[int], cp: Any) -> Tensor:
    """Rows [b, s, …] of which each context rank has its part [b, s / cp, …]; `ends` as of `borders_of`."""
    if cp.size() == 1:
        return mine
    parts = all_gathered(mine, cp)
    whole = torch.cat(parts, 1)
    for rank, part in enumerate(parts):
        whole[:, zigzag(ends, cp.size(), rank, mine.device)] = part
    return whole
