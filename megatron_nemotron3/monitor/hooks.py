"""What observers of a model in training share: finding its DDP wrapper, agreeing on the interval.

The monitors and the precision log (`precision.observe`) share this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


def no_wrapper() -> None:
    """Stand in for the reference to a DDP wrapper that was not found yet."""
    return None


def first_forward() -> bool:
    """Whether a forward pass runs for the first time; False where activation recomputation repeats it."""
    # torch.utils.checkpoint asks the same: the id is -1 outside of a backward pass.
    return torch._C._current_graph_task_id() == -1


def find_ddp(
    stack: torch.nn.Module,
    wrapped: Callable[[DistributedDataParallel], None],
    started: Callable[[], None] | None = None,
) -> None:
    """Find the DDP wrapper of a stack when it first runs; a module holds no reference to what wraps it.

    The hook is a global one of torch, removed at the stack's first forward or once the stack is gone.

    Args:
        stack: the module inside the wrapper. Only a weak reference is kept.
        wrapped: called with the wrapper, before the stack's first forward; not called without one.
        started: called when the stack's first forward begins.
    """
    reference = weakref.ref(stack)

    def look(module: torch.nn.Module, _inputs: Any) -> None:
        wanted = reference()
        if wanted is None or module is wanted:
            handle.remove()
            if wanted is not None and started is not None:
                started()
        elif isinstance(module, DistributedDataParallel) and wanted in set(module.modules()):
            wrapped(module)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)


def agree_on_interval(key: str, interval: int, what: str) -> None:
    """Compare an interval with that of the first rank that gets here; ranks that differ would hang a report.

    The ranks talk through the store of the default group, not by a collective: they build their stages in
    different orders, and Megatron waits for other stages in between.

    Args:
        key: the same on all ranks, and new for each comparison.
        interval: in iterations; 0 for off.
        what: names the setting in the error.

    Raises:
        RuntimeError: the intervals differ.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    first = int(store.compare_set(f"megatron_nemotron3/{key}", "", str(interval)))
    if first != interval:
        raise RuntimeError(
            f"{what} is {interval} on rank {torch.distributed.get_rank()} and {first} on another (0: off): "
            "export it on all nodes"
        )
