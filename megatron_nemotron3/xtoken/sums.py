"""Collectives over the ranks that share a vocabulary, with their gradients. `group` None: one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ranks(group: Any) -> tuple[int, int]:
    """Return this rank's place in the group, and the size of the group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def total(part: Tensor, group: Any) -> Tensor:
    """Sum over ranks that all compute the same from it: the gradient stays as it is."""
    return _collective(part, group, _sum, lambda gradient, _: gradient)


def shared_total(part: Tensor, group: Any) -> Tensor:
    """Sum over ranks each of which uses it for a part of its own: gradients are summed."""
    return _collective(part, group, _sum, _sum)


def scattered_total(part: Tensor, group: Any) -> Tensor:
    """Sum [n, …] over ranks; each gets its share of the rows, [n / ranks, …]."""
    return _collective(part, group, _scatter, _gather)


def gathered(part: Tensor, group: Any) -> Tensor:
    """Concatenate [n, …] of all ranks; all compute the same from it: each gets the gradient of its part."""
    return _collective(part, group, _gather, lambda gradient, at: gradient.chunk(ranks(at)[1])[ranks(at)[0]])


def largest(part: Tensor, group: Any) -> Tensor:
    """Element-wise maximum over ranks, without a gradient."""
    part = part.detach().clone()
    if ranks(group)[1] > 1:
        dist.all_reduce(part, dist.ReduceOp.MAX, group=group)
    return part


_Way = Callable[[Tensor, Any], Tensor]


def _collective(part: Tensor, group: Any, forward: _Way, backward: _Way) -> Tensor:
    return part if ranks(group)[1] == 1 else _Collective.apply(part, group, forward, backward)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, forward: _Way, backward: _Way) -> Tensor:
        ctx.group, ctx.way_back = group, backward
        return forward(part.detach(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.way_back(gradients[0], ctx.group), None, None, None


def _sum(part: Tensor, group: Any) -> Tensor:
    result = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _scatter(part: Tensor, group: Any) -> Tensor:
    result = part.new_empty((part.shape[0] // ranks(group)[1], *part.shape[1:]))
    dist.reduce_scatter_tensor(result, part.contiguous(), group=group)
    return result


def _gather(part: Tensor, group: Any) -> Tensor:
    result = part.new_empty((ranks(group)[1] * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(result, part.contiguous(), group=group)
    return result
