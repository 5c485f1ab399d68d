"""The first forward of a model, the modules around a stack, and which steps are measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


def no_wrapper() -> None:
    """Stand in for the reference to a DDP wrapper that was not found yet."""
    return None


def unwrapped(model: Any) -> Any:
    """The model inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def first_forward() -> bool:
    """Whether a forward pass runs for the first time; False where activation recomputation repeats it."""
    import torch

    # torch.utils.checkpoint tests the same: the id is -1 outside of a backward pass.
    return torch._C._current_graph_task_id() == -1


@dataclass
class MeasuredSteps:
    """Whether this step is measured: the first of a run, then each iteration that `interval` divides."""

    interval: int
    on: bool = True

    def step_done(self, iteration: int) -> None:
        """Decide about the step after `iteration`."""
        self.on = (iteration + 1) % self.interval == 0


def at_first_forward(kind: type, inspect: Callable[[Any], None]) -> RemovableHandle:
    """Call `inspect` with the first module of a class whose forward begins; the torch hook removes itself."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    def look(module: torch.nn.Module, _inputs: object) -> None:
        if isinstance(module, kind):
            handle.remove()
            inspect(module)

    handle = register_module_forward_pre_hook(look)
    return handle


def until_first_forward(stack: torch.nn.Module, look: Callable[[torch.nn.Module], None]) -> None:
    """Call `look` for every module of the process whose forward begins, the last time for the stack itself.

    So `look` sees the modules around the stack, to which a module holds no reference. The hook is a global
    one of torch. It keeps no reference to the stack, and is removed if the stack is gone.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    reference = weakref.ref(stack)

    def before(module: torch.nn.Module, _inputs: Any) -> None:
        wanted = reference()
        if wanted is None or module is wanted:
            handle.remove()
        if wanted is not None:
            look(module)

    handle = register_module_forward_pre_hook(before)


def find_ddp(stack: torch.nn.Module, wrapped: Callable[[torch.nn.Module], None]) -> None:
    """Call `wrapped` with the DDP wrapper of a stack before its first forward; not without a wrapper."""
    from megatron.core.distributed import DistributedDataParallel

    reference = weakref.ref(stack)

    def look(module: torch.nn.Module) -> None:
        if isinstance(module, DistributedDataParallel) and reference() in set(module.modules()):
            wrapped(module)

    until_first_forward(stack, look)


def find_model(stack: torch.nn.Module, found: Callable[[torch.nn.Module], None]) -> None:
    """Call `found` with the language model around a decoder stack, before its first forward."""
    reference = weakref.ref(stack)

    def look(module: torch.nn.Module) -> None:
        if getattr(module, "decoder", None) is reference():
            found(module)

    until_first_forward(stack, look)


def gather_stages(found: T, group: Any) -> list[T]:
    """What each pipeline stage found, in their order. Collective."""
    every = [found] * group.size()
    if group.size() > 1:
        from torch.distributed import all_gather_object

        all_gather_object(every, found, group=group)
    return every


def agree_on_interval(what: str, interval: int) -> None:
    """Raise RuntimeError if ranks have different intervals, which would hang a report.

    The ranks compare through the store of the default group, not by a collective: they build their stages in
    different orders, and Megatron waits for other stages in between. The n-th call of a rank is compared with
    the n-th of the rank that makes it first.
    """
    from torch.distributed import distributed_c10d

    store, rank = distributed_c10d._get_default_store(), distributed_c10d.get_rank()
    key = f"megatron_nemotron3/{what}"
    number = store.add(f"{key}/calls of rank {rank}", 1)
    first = int(store.compare_set(f"{key}/{number}", "", str(interval)))
    if first != interval:
        raise RuntimeError(
            f"{what} is {interval} on rank {rank} and {first} on another (0: off): export it on all nodes"
        )
