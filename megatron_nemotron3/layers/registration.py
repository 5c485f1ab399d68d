"""Learning which model takes a module: the specs that Megatron builds from do not say."""

from __future__ import annotations

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
