"""A step of a model on a CUDA device that is not there: shapes and devices of every operation, no values.

`FakeTensorMode` runs every operation on tensors without data that say they lie on `cuda:0`. So the code takes
the paths of a GPU, and whatever needs a value on the host cannot have it: each such place raises `HostWait`.
Beyond what the mode refuses itself (`.item()`, `tolist()`, `nonzero`, masks as indices), copies between host
and device that make the host wait are refused here, too.

Triton's launches are recorded by name and not run. Torch's autograd engine asks the driver for its threads,
so `backward` walks the graph itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_nemotron3.cpu import cpu_mode, is_active

DEVICE = torch.device("cuda", 0)


class HostWait(Exception):
    """The host would wait for the device here."""


#: Operations that read a value on the host, or whose output has a size that depends on values.
READING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}


_FACTORIES = "tensor empty zeros ones full arange rand randn randint randperm eye linspace as_tensor"
#: What `cpu_mode` replaces so that a CUDA device means the CPU.
_ORIGINALS: list[tuple[Any, str, Any]] = [
    *((torch, name, getattr(torch, name)) for name in _FACTORIES.split()),
    *((owner, name, getattr(owner, name)) for owner, name in ((torch.Tensor, "to"), (torch.nn.Module, "to"))),
]
assert not is_active()


class _Watch(TorchDispatchMode):
    """Raises `HostWait` in operations that would make the host wait for the device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        problem = _wait(func.name(), args, kwargs) if self._device.watched else None
        if problem is not None:
            raise HostWait(problem)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as refused:
            raise HostWait(f"{func.name()} needs values of the device on the host") from refused


def _wait(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Why the host would wait for the device in this operation; None if it would not."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    on_device = first is not None and first.is_cuda
    if name in READING and on_device:
        return f"{name} of a CUDA tensor"
    if name == "aten::repeat_interleave.Tensor" and on_device and kwargs.get("output_size") is None:
        return f"{name} without output_size"
    indexes = name in ("aten::index.Tensor", "aten::index_put_", "aten::index_put") and on_device
    # One value written through a mask is a masked_fill.
    filled = indexes and len(args) > 2 and args[2].numel() == 1 and True not in args[3:]
    masks = indexes and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if masks and not filled:
        return f"{name} with a mask"
    if name == "aten::_to_copy" and first is not None and not kwargs.get("non_blocking"):
        target = kwargs.get("device")
        if target is not None and torch.device(target).type != first.device.type:
            return f"copy of {list(first.shape)} from {first.device.type} to {torch.device(target).type}"
    if name == "aten::copy_" and first is not None:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if first.device.type != args[1].device.type and waits:
            return f"copy of {list(first.shape)} from {args[1].device.type} to {first.device.type}"
    return None


class Device:
    """What a block of `fake_cuda` offers."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        #: Names of the Triton kernels in the order of their launches.
        self.launched: list[str] = []
        #: Whether waits raise.
        self.watched = True

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let the host wait for the device inside the block, as it may before the first step."""
        self.watched = False
        try:
            yield
        finally:
            self.watched = True

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put a model of the CPU on the device: fake parameters and buffers of the same names and marks."""
        moved: dict[int, Tensor] = {}
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = moved.setdefault(id(tensor), self.like(tensor))
            for name, value in vars(module).items():  # such as the parameters that Mamba's exchange keeps
                if isinstance(value, Tensor) and id(value) in moved:
                    setattr(module, name, moved[id(value)])
        for value in (
            v for m in model.modules() for v in vars(m).values() if hasattr(v, "conv1d_weight_cp1")
        ):
            for name, tensor in vars(value).items():
                if isinstance(tensor, Tensor):
                    setattr(value, name, moved[id(tensor)])
        return model

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor of the device with the shape, dtype and attributes of a real one."""
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            setattr(fake, name, value)
        return fake


@contextlib.contextmanager
def fake_cuda(build: Callable[[], torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Device]]:
    """Build a model on the CPU inside `cpu_mode`, then run the block with it on a fake CUDA device."""
    import triton
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_mode())
        model = build()

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for owner, name, original in _ORIGINALS:  # devices are what they say
            replace(owner, name, original)
        replace(torch.cuda, "current_device", lambda: DEVICE)
        replace(torch.cuda, "is_available", lambda: False)  # else fake tensors start the driver
        replace(torch.cuda, "get_device_capability", lambda *_: (9, 0))

        def waits(*_: Any) -> None:
            raise HostWait("waits for an event or a stream")

        for owner in (torch.cuda.Event, torch.cuda.Stream):
            replace(owner, "synchronize", waits)
        replace(torch.cuda, "synchronize", waits)
        for owner, name in _collectives():
            replace(owner, name, _no_collective)
        replace(torch.autograd, "backward", backward)  # of full recomputation
        replace(torch.Tensor, "record_stream", lambda *_: None)
        replace(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())  # compares CPU states
        kept = stack.enter_context(_without_kept_tensors())
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        device = Device(mode)

        def launch(kernel: Any, *_: Any, **__: Any) -> None:
            device.launched.append(kernel.fn.__name__)

        replace(triton.runtime.jit.JITFunction, "run", launch)
        stack.enter_context(mode)
        for scaler in kept:  # a training loop sets them before its first step
            scaler.main_loss_backward_scale = torch.ones((), device=DEVICE)
        stack.enter_context(_Watch(device))
        yield device.place(model), device


@contextlib.contextmanager
def first_of_two_ranks(**layout: int) -> Iterator[None]:
    """Megatron's groups on rank 0 of two, of torch's backend that does not communicate.

    Args:
        layout: of `initialize_model_parallel`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    with cpu_mode():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
        try:
            parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _collectives() -> list[tuple[Any, str]]:
    """Collectives, also under the names that Megatron gave them; their outputs are there before."""
    from megatron.core.tensor_parallel import layers, mappings

    names = "all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single broadcast"
    own = [(m, n) for m in (layers, mappings) for n in ("dist_all_gather_func", "dist_reduce_scatter_func")]
    return [*((torch.distributed, name) for name in names.split()), *(p for p in own if hasattr(*p))]


def _no_collective(*_: Any, async_op: bool = False, **__: Any) -> Any:
    return SimpleNamespace(wait=lambda: None) if async_op else None


@contextlib.contextmanager
def _without_kept_tensors() -> Iterator[tuple[Any, ...]]:
    """Tensors that Megatron keeps from model to model lie on the device that it was built on."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    def clear() -> None:
        get_moe_metrics_tracker().metrics.clear()
        MTPLossLoggingHelper.tracker.clear()

    scalers: tuple[Any, ...] = (MoEAuxLossAutoScaler, MTPLossAutoScaler)
    before = [scaler.main_loss_backward_scale for scaler in scalers]
    clear()
    try:
        yield scalers
    finally:
        clear()
        for scaler, scale in zip(scalers, before, strict=True):
            scaler.main_loss_backward_scale = scale


def backward(outputs: Any, gradients: Any = None) -> None:
    """What `torch.autograd.backward` does, without torch's engine."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    gradients = gradients if isinstance(gradients, (list, tuple)) else [gradients] * len(outputs)
    given: dict[Any, dict[int, Tensor]] = {}
    with torch.no_grad():
        for output, gradient in zip(outputs, gradients, strict=True):
            start = torch.ones_like(output) if gradient is None else gradient
            given.setdefault(output.grad_fn, {})[output.output_nr] = start
        for node in _in_order(list(given)):
            grads = given.pop(node, None)
            if grads is None:
                continue
            if hasattr(node, "variable"):
                _accumulate(node.variable, grads[0])
                continue
            for (parent, number), grad in _apply(node, grads):
                if parent is not None and grad is not None:
                    wanted = parent._input_metadata[number]  # as the engine: sum where it was broadcast, cast
                    grad = grad.sum_to_size(wanted.shape).to(wanted.dtype)
                    inputs = given.setdefault(parent, {})
                    inputs[number] = inputs[number] + grad if number in inputs else grad


def _apply(node: Any, grads: dict[int, Tensor]) -> list[tuple[Any, Tensor | None]]:
    """(edge, gradient) of a node's inputs from the gradients of its outputs."""
    metadata = node._input_metadata
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    arguments = [grads.get(i) for i in range(len(metadata))]
    if own:  # torch fills in zeros
        arguments = [
            torch.zeros(tuple(m.shape), dtype=m.dtype, device=DEVICE) if a is None else a
            for a, m in zip(arguments, metadata, strict=True)
        ]
    result = node.apply(*arguments) if own else node(*arguments)
    result = result if isinstance(result, tuple) else (result,)
    if not own:
        return list(zip(node.next_functions, result, strict=True))
    # A custom function also returns None for arguments that are no tensors, for which there is no edge.
    wanted = [grad for grad, needed in zip(result, node.needs_input_grad, strict=True) if needed]
    return list(zip((edge for edge in node.next_functions if edge[0] is not None), wanted, strict=True))


def _accumulate(variable: Tensor, grad: Tensor) -> None:
    assert grad.shape == variable.shape, (grad.shape, variable.shape)
    assert grad.device == variable.device and grad.dtype == variable.dtype
    variable.grad = grad if variable.grad is None else variable.grad + grad


def _in_order(roots: list[Any]) -> list[Any]:
    """The nodes of a graph, each after all that pass it a gradient."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((n, False) for n, _ in node.next_functions if n is not None and n not in seen)
    return order[::-1]
