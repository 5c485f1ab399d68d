"""Counts what collectives move, group by group, whatever the backend."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_nemotron3.launch.plan.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND

#: Operation of torch.distributed's dispatcher -> (collective, which argument is the buffer of all ranks).
_OPERATIONS = {
    "_allgather_base_": (ALL_GATHER, 0),
    "allgather_": (ALL_GATHER, 0),
    "allgather_into_tensor_coalesced_": (ALL_GATHER, 0),
    "_reduce_scatter_base_": (REDUCE_SCATTER, 1),
    "reduce_scatter_": (REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced_": (REDUCE_SCATTER, 1),
    "allreduce_": (ALL_REDUCE, 0),
    "alltoall_base_": (ALL_TO_ALL, 1),
    "send": (SEND, 0),
}


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


class Collectives(TorchDispatchMode):
    """Bytes of buffers of each (group's ranks, collective) while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[tuple[int, ...], str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in _OPERATIONS:
            collective, buffer = _OPERATIONS[name]
            (group,) = (ProcessGroup.unbox(a) for a in args if _is_group(a))
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
            self.bytes[ranks, collective] += _bytes(args[buffer])
        return func(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith("ProcessGroup")
