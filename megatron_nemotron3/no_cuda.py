"""Stand-ins for the objects of `torch.cuda` on a machine without one; `cpu.py` puts them in place."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any


class Stream:
    """A stream on a machine where everything happens in order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class Event:
    """An event that has always happened; its clock is the host's."""

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
    """`torch.cuda.current_device()`: "cpu" where a device is asked for, 0 in "cuda:{}"."""

    def __format__(self, spec: str) -> str:
        return "0"


class Device(nullcontext):
    """`with torch.cuda.device(i)`; a class, because torch asks isinstance."""


class Properties:
    """`torch.cuda.get_device_properties`: an Ampere in name, so that --moe-grouped-gemm is accepted."""

    name, major, minor = "cpu", 8, 0
    multi_processor_count, total_memory = 1, 0


class Generators:
    """`torch.cuda.default_generators`: every index is the CPU generator."""

    def __getitem__(self, index: Any) -> Any:
        import torch

        return torch.default_generator

    def __len__(self) -> int:
        return 1


class Zeros(dict):
    """Memory statistics of a device without memory."""

    def __missing__(self, key: str) -> int:
        return 0
