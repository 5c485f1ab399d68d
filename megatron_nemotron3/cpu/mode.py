"""`cpu_mode`, which applies the tables of `torch_names`, `collectives`, `products` and `megatron`."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from megatron_nemotron3.cpu import megatron, torch_names

_active = False


def is_active() -> bool:
    """Whether `cpu_mode` is in force."""
    return _active


def quiet_on_cpu() -> None:
    """Drop the warnings of torch and Megatron about a missing GPU, TE or apex, which come at import."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for message in (
        "(Transformer Engine and Apex are|Apex is) not installed",
        "Only transformer-engine.* supports MoE experts, but your version is 0.0.0",
        "Could not determine rank",
    ):
        warnings.filterwarnings("ignore", message=message)


def _about_cpu_rng(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def import_megatron(module: str) -> None:
    """Import it, without a GPU without `torch.compile`: a fifth of Megatron's import is the compiler."""
    import torch

    original = torch.compile
    if not torch.cuda.is_available():
        torch.compile = torch_names.uncompiled
    try:
        importlib.import_module(module)
    finally:
        torch.compile = original
    # Optimizers import it, and it looks up functions of torch by identity, which `cpu_mode` replaces.
    importlib.import_module("torch._dynamo")


@contextmanager
def cpu_mode(announce: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Make CUDA names mean the CPU inside the block. Re-entrant.

    Args:
        announce: called with one line that lists the Megatron arguments that had to be changed.
    """
    global _active
    if _active:
        yield
        return
    import torch

    from megatron_nemotron3.cpu import products

    quiet_on_cpu()
    with ExitStack() as stack:
        # Imported first, so that Megatron binds the originals at import: its bindings outlive the block.
        import_megatron("megatron.core")
        # torch caches the functions that `with torch.device(…)` concerns, in its first use.
        with torch.device("cpu"):
            torch.empty(0)
        free = megatron.CONNECTIONS not in os.environ
        for target, name, value in [*torch_names.table(), *products.table(), *megatron.table(announce, free)]:
            original = getattr(target, name)
            setattr(target, name, value)
            stack.callback(setattr, target, name, original)
        if free:
            os.environ[megatron.CONNECTIONS] = "1"
            stack.callback(os.environ.pop, megatron.CONNECTIONS, None)
        # What was compiled before the block needs a device, too.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Here the "device" generator is the CPU's, so Megatron warns for no reason; its state is restored.
        tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
        tracker_log.addFilter(_about_cpu_rng)
        stack.callback(tracker_log.removeFilter, _about_cpu_rng)
        _active = True
        try:
            yield
        finally:
            _active = False
