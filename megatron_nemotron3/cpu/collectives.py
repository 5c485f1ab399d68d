"""`torch.distributed` on gloo: nccl's names mean gloo, and collectives that gloo lacks are added.

Groups of the same one rank are one group here: each gloo group polls its sockets a hundred times a second in
a thread of its own, and Megatron makes many. Parts of different sizes, as tokens of experts have with expert
tensor parallelism, and scalars are gathered and scattered, too: gloo refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_new_group, _destroy = dist.new_group, dist.destroy_process_group
_new_subgroups = dist.new_subgroups_by_enumeration
_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter
_all_gather_into_tensor = dist.all_gather_into_tensor
#: The world that the groups below belong to; a process can be in another one later.
_world: Any = None
#: Rank -> its group; on the other ranks torch's placeholder for non-members.
_groups: dict[int, Any] = {}


def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.distributed.new_group`; groups of one rank are shared. As in torch, all ranks must call it."""
    global _world
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    # With local synchronization (the fifth argument) other ranks do not call.
    if len(members) != 1 or kwargs.get("use_local_synchronization") or len(args) > 3:
        return _new_group(ranks, *args, **kwargs)
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _groups.clear()
    (rank,) = members
    if rank not in _groups:
        _groups[rank] = _new_group(members, *args, **kwargs)
    return _groups[rank]


def new_subgroups_by_enumeration(ranks_per_subgroup_list: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.distributed.new_subgroups_by_enumeration`; groups of one rank are shared.

    Megatron's HyperCommGrid calls it for each dimension of each module of a MIMO model, and products of them.
    """
    lists = [list(ranks) for ranks in ranks_per_subgroup_list or ()]
    alone = {ranks[0] for ranks in lists if len(ranks) == 1}
    if args or not lists or len(alone) < len(lists):
        return _new_subgroups(ranks_per_subgroup_list, *args, **kwargs)
    groups = [new_group(ranks, **kwargs) for ranks in lists]
    return next((group for ranks, group in zip(lists, groups) if dist.get_rank() in ranks), None), groups


def destroy_process_group(group: Any = None) -> None:
    """`torch.distributed.destroy_process_group`; a shared group lives as long as the world."""
    global _world
    if group is None or group is dist.group.WORLD:
        _world = None
        _groups.clear()
    elif any(group is shared for shared in _groups.values()):
        return
    _destroy(group)


def _is_supported(name: str, parts: list[torch.Tensor], group: Any, async_op: bool) -> bool:
    """Whether torch's own collective takes these parts; ours is synchronous."""
    if dist.get_backend(group) != "gloo" or len({part.shape for part in parts}) <= 1:
        return True
    if async_op:
        raise NotImplementedError(
            f"{name} of parts of different sizes is synchronous on gloo: use async_op=False"
        )
    return False


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """`torch.distributed.all_gather` for parts [n_r, …] of any n_r: one broadcast from each rank."""
    if _is_supported("all_gather", tensor_list, group, async_op):
        return _all_gather(tensor_list, tensor, group=group, async_op=async_op)
    rank = dist.get_rank(group)
    for source, part in enumerate(tensor_list):
        if source == rank:
            part.copy_(tensor)
        if part.numel():  # gloo needs contiguous, non-empty memory
            whole = part.contiguous()
            dist.broadcast(whole, group=group, group_src=source)
            if whole is not part:
                part.copy_(whole)
    return None


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """`torch.distributed.reduce_scatter` for parts [n_r, …] of any n_r: one reduction to each rank."""
    if _is_supported("reduce_scatter", input_list, group, async_op):
        return _reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    rank = dist.get_rank(group)
    for target, part in enumerate(input_list):
        summed = part.clone(memory_format=torch.contiguous_format)
        if summed.numel():
            dist.reduce(summed, group=group, group_dst=target, op=op)
        if target == rank:
            output.copy_(summed)
    return None


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """`torch.distributed.all_gather_into_tensor`, also of scalars, which nccl gathers and gloo refuses.

    nvidia-modelopt counts the layers that are left this way: without it pruning depth ends with
    "ProcessGroupGloo::allgather: invalid tensor size at index 0".
    """
    local = input_tensor.reshape(-1) if input_tensor.dim() == 0 else input_tensor
    return _all_gather_into_tensor(output_tensor, local, *args, **kwargs)


def table() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for `torch.distributed`; options of nccl are dropped."""

    def on_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if "backend" in kwargs:
                kwargs["backend"] = _gloo(kwargs["backend"])
            kwargs |= {name: None for name in ("pg_options", "device_id") if name in kwargs}
            return function(*map(_gloo, args), **kwargs)

        return wrapper

    from torch.distributed.device_mesh import DeviceMesh

    mesh_of = DeviceMesh.from_group

    def mesh_from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh_of(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    # torch's own module calls its unpatched `new_group`, so functions that make groups by it are listed, too.
    return [
        (dist, "init_process_group", on_gloo(dist.init_process_group)),
        (dist, "new_subgroups_by_enumeration", on_gloo(new_subgroups_by_enumeration)),
        (dist, "new_group", on_gloo(new_group)),
        (dist, "destroy_process_group", destroy_process_group),
        (dist, "all_gather", all_gather),
        (dist, "all_gather_into_tensor", all_gather_into_tensor),
        (dist, "reduce_scatter", reduce_scatter),
        (DeviceMesh, "from_group", mesh_from_group),
    ]


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend
