"""The reduced gradients in Megatron's buffers after an optimizer step, each element read on one rank.

With the distributed optimizer a rank reads its shard of each bucket; with all-reduced gradients the same
sharding divides the work. What tensor-parallel ranks replicate is read on the first of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

#: Parameter -> (bucket, (start, end) in the bucket, process group over which the bucket is sharded).
GradientPlaces = dict[Any, tuple[Any, tuple[int, int], Any]]


def gradient_places(ddp: Any) -> GradientPlaces | None:
    """Where Megatron's DistributedDataParallel keeps each parameter's gradient.

    None where gradients do not outlive the step: with FSDP, and with `--reuse-grad-buf-for-mxfp8-param-ag`.
    """
    if ddp is None or ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        return None
    return {
        parameter: (bucket, bucket.param_to_index[parameter], _sharding_group(group))
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        for bucket in group.buckets
        for parameter in bucket.params_list
    }


def _sharding_group(bucket_group: Any) -> Any:
    if bucket_group.ddp_config.use_distributed_optimizer:
        return bucket_group.intra_distributed_optimizer_instance_group
    return bucket_group.data_parallel_group


def local_gradient(parameter: Any, where: GradientPlaces, groups: Any) -> Tensor | None:
    """The part of a parameter's reduced gradient that this rank reads, 1-D; None if there is none."""
    if parameter not in where or not _is_read_here(parameter, groups):
        return None
    bucket, (start, end), group = where[parameter]
    shard = -(-bucket.grad_data.numel() // group.size())
    start, end = max(start, group.rank() * shard), min(end, (group.rank() + 1) * shard)
    gradient: Tensor | None = bucket.grad_data[start:end] if start < end else None
    return gradient


def _is_read_here(parameter: Any, groups: Any) -> bool:
    """Whether this tensor-parallel rank reads a parameter: its own shard, or on rank 0 a replica."""
    if getattr(parameter, "tensor_model_parallel", False):
        return True
    expert = not getattr(parameter, "allreduce", True)
    return bool((groups.expt_tp if expert else groups.tp).rank() == 0)
