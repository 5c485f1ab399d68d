"""Collectives whose ranks hold different amounts, which NCCL has and gloo has not.

Megatron gathers and scatters tokens with expert tensor parallelism this way: each rank's experts have another
number of them. Where all parts have one size gloo's own collectives do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def _even(parts: list[torch.Tensor], group: Any) -> bool:
    return dist.get_backend(group) != "gloo" or len({part.shape for part in parts}) <= 1


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """`torch.distributed.all_gather` for parts [n_r, …] of any n_r: one broadcast from every rank."""
    if _even(tensor_list, group):
        return _all_gather(tensor_list, tensor, group=group, async_op=async_op)
    if async_op:
        raise NotImplementedError("all_gather of unequal parts on gloo waits: async_op=False")
    rank = dist.get_rank(group)
    for source, part in enumerate(tensor_list):
        if source == rank:
            part.copy_(tensor)
        _on_contiguous(part, lambda t, source=source: dist.broadcast(t, group=group, group_src=source))
    return None


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """`torch.distributed.reduce_scatter` for parts [n_r, …] of any n_r: one reduction to every rank."""
    if _even(input_list, group):
        return _reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    if async_op:
        raise NotImplementedError("reduce_scatter of unequal parts on gloo waits: async_op=False")
    rank = dist.get_rank(group)
    for target, part in enumerate(input_list):
        summed = part.clone(memory_format=torch.contiguous_format)
        if summed.numel():
            dist.reduce(summed, group=group, group_dst=target, op=op)
        if target == rank:
            output.copy_(summed)
    return None


def _on_contiguous(tensor: torch.Tensor, collective: Any) -> None:
    """Run a collective in place; gloo wants contiguous memory and something in it."""
    if not tensor.numel():
        return
    whole = tensor.contiguous()
    collective(whole)
    if whole is not tensor:
        tensor.copy_(whole)
