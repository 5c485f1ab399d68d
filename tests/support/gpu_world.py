"""Process groups of a single rank on either device, a counter of host waits, kernels of attention."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def world(device: str, seed: int = 1234) -> Iterator[None]:
    """Megatron's groups and random generators for one rank: "cuda" (NCCL) or "cpu" (`cpu_mode`, gloo)."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_nemotron3.cpu import cpu_mode

    # The class keeps the stream of the first model; a stream of cpu_mode would not order anything on a GPU.
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
    """Let NCCL use the loopback interface: it needs one even for a single rank without any network."""
    had = os.environ.get("NCCL_SOCKET_IFNAME")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if had is None:
            del os.environ["NCCL_SOCKET_IFNAME"]


def host_waits(function: Callable[[], Any], device: str) -> int:
    """Count how often the host waits for the device while `function` runs.

    On CUDA these are the warnings of `torch.cuda.set_sync_debug_mode("warn")` (copies to the host, `nonzero`,
    waits for a stream), plus the waits it does not report: `Event.synchronize` and `torch.cuda.synchronize`.
    Waits inside other libraries (NCCL, Triton) are not counted. On a CPU these are the operations of torch's
    dispatcher that would wait on CUDA, `WAITING`.
    """
    return _waits_on_cuda(function) if device == "cuda" else _waits_if_on_cuda(function)


def _waits_on_cuda(function: Callable[[], Any]) -> int:
    import torch

    unreported = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal unreported
            unreported += 1
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
    return unreported + sum("synchronizing CUDA operation" in str(w.message) for w in caught)


#: Operations whose result is copied to the host, or has a size that depends on the data.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
}


def _waits_if_on_cuda(function: Callable[[], Any]) -> int:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        waits = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            sized = not (func.name() == "aten::repeat_interleave.Tensor" and kwargs.get("output_size"))
            # Indexing with a mask calls nonzero inside the kernel; filling with a mask does not.
            masks = func.name() == "aten::index.Tensor" and any(
                t is not None and t.dtype == torch.bool for t in args[1]
            )
            self.waits += masks or (func.name() in WAITING and sized)
            return func(*args, **kwargs)

    with Counter() as counter:
        function()
    return counter.waits


@contextmanager
def attention_kernels() -> Iterator[list[str]]:
    """The names of the attention operations that torch chooses; complete at the end."""
    from torch.profiler import ProfilerActivity, profile

    names: list[str] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield names
    names += [event.name for event in profiled.events() if "attention" in event.name]
