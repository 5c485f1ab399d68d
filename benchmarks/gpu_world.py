"""A world of one process on either device, and how often a function makes the host wait for the device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def world(device: str, seed: int = 1234) -> Iterator[None]:
    """Megatron's groups and random streams for one process: "cuda" (NCCL) or "cpu" (`cpu_mode`, gloo)."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_nemotron3.cpu import cpu_mode

    # The class keeps the stream of the first model; one of cpu_mode would not order anything on a GPU.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    with cpu_mode() if device == "cpu" else _sockets_of_this_host():
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=device == "cpu")
            torch.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None


@contextmanager
def _sockets_of_this_host() -> Iterator[None]:
    """NCCL looks for an interface even for one process; a machine cut off from any network has this one."""
    had = os.environ.get("NCCL_SOCKET_IFNAME")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if had is None:
            del os.environ["NCCL_SOCKET_IFNAME"]


def host_waits(function: Callable[[], Any], device: str) -> int:
    """How often the host has to wait for the device while `function` runs.

    On CUDA: the warnings of `torch.cuda.set_sync_debug_mode("warn")` (copies to the host, `nonzero`, waits
    for a stream), and the waits it says nothing about: `Event.synchronize` and `torch.cuda.synchronize`.
    Waits inside other libraries (NCCL, Triton) are not seen. On a CPU: the operations that would have to
    wait on CUDA, `WAITING` of torch's dispatcher.
    """
    return _waits_on_cuda(function) if device == "cuda" else _waits_to_be(function)


def _waits_on_cuda(function: Callable[[], Any]) -> int:
    import torch

    unseen = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal unseen
            unseen += 1
            return original(*args, **kwargs)

        return wrapper

    places: list[tuple[Any, str]] = [(torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize")]
    originals = [getattr(owner, name) for owner, name in places]
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, counting(original))
        try:
            function()
        finally:
            for (owner, name), original in zip(places, originals, strict=True):
                setattr(owner, name, original)
            torch.cuda.set_sync_debug_mode("default")
    return unseen + sum("synchronizing CUDA operation" in str(w.message) for w in caught)


#: Operations whose result has a size, or goes to a place, that only the host can know.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
}


def _waits_to_be(function: Callable[[], Any]) -> int:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        waits = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            sized = not (func.name() == "aten::repeat_interleave.Tensor" and kwargs.get("output_size"))
            # Indexing by a mask asks for its nonzero positions inside the kernel; filling by one does not.
            masks = func.name() == "aten::index.Tensor" and any(
                t is not None and t.dtype == torch.bool for t in args[1]
            )
            self.waits += masks or (func.name() in WAITING and sized)
            return func(*args, **kwargs)

    with Counter() as counter:
        function()
    return counter.waits
