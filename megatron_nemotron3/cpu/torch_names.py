"""Replacements on a CPU for `torch.cuda`, `torch.accelerator` and torch functions that take a device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class CpuStream:
    """A stream on a machine that runs everything in order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class Event:
    """An event that is always complete; times are those of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two records."""
        return (end._time - self._time) * 1e3


class CurrentDevice(str):
    """`torch.cuda.current_device()`: "cpu" as a device, and 0 in "cuda:{}" and compared with a number."""

    __hash__ = str.__hash__

    def __format__(self, spec: str) -> str:
        return "0"

    def __eq__(self, other: object) -> bool:
        return other == 0 if isinstance(other, int) else super().__eq__(other)

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()  # 0; Megatron saves it with a step that is to run again


class Device(nullcontext):
    """`with torch.cuda.device(i)`; a class, because torch calls isinstance with it."""


class Properties:
    """`torch.cuda.get_device_properties`: compute capability 8.0, so that --moe-grouped-gemm is accepted."""

    name, major, minor = "cpu", 8, 0
    multi_processor_count, total_memory = 1, 0


class Generators:
    """`torch.cuda.default_generators`: every index is the CPU generator."""

    def __getitem__(self, index: Any) -> Any:
        import torch

        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with any CUDA device among its arguments replaced by the CPU."""
    import torch

    kinds = (str, torch.device)

    def is_cuda(device: Any) -> bool:
        return isinstance(device, kinds) and str(device).startswith("cuda")

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if any(is_cuda(a) for a in args):
            args = tuple("cpu" if is_cuda(a) else a for a in args)
        return function(*args, **kwargs)

    return wrapper


def uncompiled(model: Any = None, **options: Any) -> Any:
    """`torch.compile` that compiles nothing: without a GPU there is nothing to compile for.

    The real one fails here even as a decorator of a function that is never called, since it looks up the
    functions of torch by identity and finds some of our replacements under several names.
    """
    return model if model is not None else lambda function: function


def _accelerator_table(cuda: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """The same device by the names of `torch.accelerator`, which optimizers ask since torch 2.15."""
    import torch

    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    values: dict[str, Any] = {
        **cuda,
        **dict.fromkeys(("set_device_index", "set_device_idx", "empty_host_cache"), cuda["set_device"]),
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_index": Device,
        "get_device_capability": lambda *_: {"supported_dtypes": dtypes},
        "get_memory_info": lambda *_: (0, 0),
    }
    # Each version of torch has other names.
    modules = (torch.accelerator, getattr(torch.accelerator, "random", None))
    names = [(module, name) for module in modules for name in getattr(module, "__all__", ())]
    return [(module, name, values[name]) for module, name in names if name in values]


def table() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for torch itself."""
    import torch

    from megatron_nemotron3.cpu import collectives

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Optimizers and clip_grads test for the name "torch.cuda.FloatTensor".
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_type(self, dtype, *args, **kwargs)

    original_type = torch.Tensor.type
    factories = "tensor empty zeros ones full arange rand randn randint randperm eye linspace as_tensor"
    # torch.manual_seed calls manual_seed_all after seeding the CPU.
    actions = (
        "set_device synchronize empty_cache manual_seed_all set_stream "
        "reset_peak_memory_stats reset_accumulated_memory_stats"
    )
    memory = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used"
    types = "Float Half BFloat16 Double Int Long Byte"
    cuda: dict[str, Any] = {
        **dict.fromkeys(actions.split(), nothing),
        **dict.fromkeys(memory.split(), zero),
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in types.split()},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: CurrentDevice("cpu"),
        "device": Device,
        "initial_seed": torch.initial_seed,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "default_generators": Generators(),
        "Stream": CpuStream,
        "Event": Event,
        "stream": lambda *_: nullcontext(),
        "current_stream": lambda *_: CpuStream(),
        "default_stream": lambda *_: CpuStream(),
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (8, 0),  # the least that --moe-grouped-gemm accepts
        "get_device_properties": lambda *_: Properties(),
        "get_device_name": lambda *_: "cpu",
        "memory_stats": lambda *_: Counter(),  # every value is 0
    }
    return [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        *_accelerator_table(cuda),
        (torch.cuda.random, "get_rng_state", cuda["get_rng_state"]),
        (torch.cuda.random, "set_rng_state", cuda["set_rng_state"]),
        (torch.cuda.nvtx, "range_push", nothing),
        (torch.cuda.nvtx, "range_pop", nothing),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in factories.split()),
        (torch, "compile", uncompiled),
        (torch.Tensor, "to", _on_cpu(torch.Tensor.to)),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "pin_memory", lambda self, *_, **__: self),
        (torch.Tensor, "type", tensor_type),
        (torch.nn.Module, "to", _on_cpu(torch.nn.Module.to)),
        (torch.nn.Module, "cuda", lambda self, *_: self),
        *collectives.table(),
    ]
