"""Process groups of one rank, made once.

Megatron makes a group for every kind of parallelism, most of them of one rank on a small machine. Each gloo
group polls its sockets a hundred times a second in a thread of its own, and nothing ever ends the threads of
a group that something still refers to: a long process spends its time waking them. Groups of the same one
rank are the same group here: it communicates with nobody, so nobody's messages can mix in it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_new_group, _destroy = dist.new_group, dist.destroy_process_group
#: The world the groups below are of; a process can be in another one later.
_world: Any = None
#: Rank -> its group; on all other ranks what torch gives those that are not in it.
_groups: dict[int, Any] = {}


def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.distributed.new_group`; groups of one rank are shared. Every rank calls it, as torch asks."""
    global _world
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    # With local synchronization (the fifth argument) other ranks do not call, and would not know of it.
    if len(members) != 1 or kwargs.get("use_local_synchronization") or len(args) > 3:
        return _new_group(ranks, *args, **kwargs)
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _groups.clear()
    (rank,) = members
    if rank not in _groups:
        _groups[rank] = _new_group(members, *args, **kwargs)
    return _groups[rank]


def destroy_process_group(group: Any = None) -> None:
    """`torch.distributed.destroy_process_group`; a shared group lives as long as the world."""
    global _world
    if group is None or group is dist.group.WORLD:
        _world = None
        _groups.clear()
    elif any(group is shared for shared in _groups.values()):
        return
    _destroy(group)
