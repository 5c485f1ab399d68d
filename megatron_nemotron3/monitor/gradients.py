"""Exactly zero elements among the gradients of a layer's weights, each element counted on one rank.

After an optimizer step Megatron's gradient buffers still hold the gradients of the global batch. With the
distributed optimizer only this rank's share of a bucket is reduced, so that is what a rank looks at; with
all-reduced gradients the same cut divides the work. What tensor-parallel ranks hold in common is counted
on the first of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Parameter -> (bucket, (start, end) in it, ranks that share it).
Places = dict[Any, tuple[Any, tuple[int, int], Any]]


def places(ddp: Any) -> Places | None:
    """Where Megatron's DistributedDataParallel keeps each parameter's gradient.

    None where the gradients are gone after the step: with FSDP, which has no such buffers, and where MXFP8
    parameters are gathered into them (`--reuse-grad-buf-for-mxfp8-param-ag`).
    """
    if ddp is None or ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        return None
    return {
        parameter: (bucket, bucket.param_to_index[parameter], _group(group))
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        for bucket in group.buckets
        for parameter in bucket.params_list
    }


def zero_gradients(module: torch.nn.Module, where: Places, groups: Any) -> Tensor:
    """[zeros, elements] (float64) of this rank's share of the gradients of `module`'s weights.

    Args:
        where: `places` of the model's DDP wrapper.
        groups: ProcessGroupCollection with `tp` and `expt_tp`.
    """
    zeros: list[Tensor] = []
    elements = 0
    for parameter in module.parameters():
        if parameter in where and counts_here(parameter, groups):
            share = cut(*where[parameter])
            if share is not None:
                zeros.append(share.numel() - torch.count_nonzero(share))
                elements += share.numel()
    device = next(module.parameters()).device
    count = torch.stack(zeros).sum() if zeros else torch.zeros((), device=device)
    return torch.stack([count.double(), torch.full((), elements, dtype=torch.float64, device=device)])


def _group(bucket_group: Any) -> Any:
    if bucket_group.ddp_config.use_distributed_optimizer:
        return bucket_group.intra_distributed_optimizer_instance_group
    return bucket_group.data_parallel_group


def cut(bucket: Any, span: tuple[int, int], group: Any) -> Tensor | None:
    """The part of span that lies in this rank's share of the bucket, if there is one."""
    share = -(-bucket.grad_data.numel() // group.size())
    start, end = max(span[0], group.rank() * share), min(span[1], (group.rank() + 1) * share)
    return bucket.grad_data[start:end] if start < end else None


def counts_here(parameter: Any, groups: Any) -> bool:
    if getattr(parameter, "tensor_model_parallel", False):
        return True
    expert = not getattr(parameter, "allreduce", True)
    return bool((groups.expt_tp if expert else groups.tp).rank() == 0)
