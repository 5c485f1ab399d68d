"""What a module that Megatron builds from a spec is not told: the model that takes it, and the arguments."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch


def when_taken(
    module: torch.nn.Module, holds: Callable[[Any, Any], bool], then: Callable[[torch.nn.Module], None]
) -> None:
    """Call `then(parent)` once, when a parent takes a child for which `holds(child, module)` is true."""
    reference = weakref.ref(module)

    def registered(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
        waiting = reference()
        if waiting is None:
            hook.remove()
        elif child is not None and holds(child, waiting):
            hook.remove()
            then(parent)

    hook = torch.nn.modules.module.register_module_module_registration_hook(registered)


def keep_argument(name: str, value: str) -> None:
    """Put a value into Megatron's global arguments, which a checkpoint stores, if there are any."""
    training = sys.modules.get("megatron.training.global_vars")
    if training is not None and training._GLOBAL_ARGS is not None:
        setattr(training.get_args(), name, value)
