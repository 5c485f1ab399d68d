"""Asynchronous saves on a CPU, by the process that each rank has for writing Megatron's checkpoints.

Megatron chooses a CUDA device in it, which fails without one. And it copies the weights there before training
goes on, from the GPU: tensors of a CPU arrive in shared memory and are not copied, so the optimizer's next
step would change what is being written.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_nemotron3.cpu import torch_names

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def write_saves(*args: Any, **kwargs: Any) -> None:
    """`PersistentAsyncCaller.async_loop` without CUDA, in a process that does nothing else."""
    caller = importlib.import_module(f"{_STRATEGIES}.async_utils").PersistentAsyncCaller
    writer = importlib.import_module(f"{_STRATEGIES}.filesystem_async").FileSystemWriterAsync
    preload = writer.preload_tensors

    def copy_tensors(*args: Any, **kwargs: Any) -> Any:
        return [
            (name, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for name, key, (data, tensors) in preload(*args, **kwargs)
        ]

    for target, name, value in [*torch_names.table(), (writer, "preload_tensors", copy_tensors)]:
        setattr(target, name, value)
    caller.async_loop(*args, **kwargs)


def table() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) in the training process."""
    caller = importlib.import_module(f"{_STRATEGIES}.async_utils").PersistentAsyncCaller
    return [(caller, "async_loop", write_saves)]


@contextmanager
def forked_results() -> Iterator[None]:
    """Inside the block the queue of Megatron's checkpoint writer is in a forked process.

    Megatron spawns it, which imports torch and Megatron once more: four seconds for each rank that saves. A
    rank that others wait for by the end of a pipe must do without: a forked process keeps the pipe open.
    """
    make = inspect.unwrap(importlib.import_module(f"{_STRATEGIES}.filesystem_async").get_write_results_queue)
    before = make.__defaults__
    make.__defaults__ = ("fork",)
    try:
        yield
    finally:
        make.__defaults__ = before
