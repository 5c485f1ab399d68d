"""What a module that Megatron builds from a spec does not get: the model that takes it, and the arguments."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Holds = Callable[[Any, Any], bool]

#: A module, whether a child holds it, and what to call then.
_WAITING: list[tuple[weakref.ref[torch.nn.Module], Holds, Callable[[torch.nn.Module], None]]] = []


def when_taken(module: torch.nn.Module, holds: Holds, then: Callable[[torch.nn.Module], None]) -> None:
    """Call `then(parent)` once, when a parent takes a child for which `holds(child, module)` is true."""
    _listen()
    _WAITING.append((weakref.ref(module), holds, then))


@cache
def _listen() -> None:
    # One hook for good: torch's loop over these hooks fails if one of them removes itself before the last.
    torch.nn.modules.module.register_module_module_registration_hook(_registered)


def _registered(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
    for one in tuple(_WAITING):
        reference, holds, then = one
        waiting = reference()
        if waiting is None:
            _WAITING.remove(one)
        elif child is not None and holds(child, waiting):
            _WAITING.remove(one)
            then(parent)


def when_complete(stack: torch.nn.Module, then: Callable[[Any], None]) -> None:
    """Call `then(model)` when the model that a stack is put into is complete, before DDP wraps it.

    Megatron calls `finish_init` of a model's modules then; the module that takes the stack is the model.
    """
    model: list[weakref.ref[torch.nn.Module]] = []

    def finish_init(quant_config: Any) -> None:
        owner = model[0]() if model else None
        if owner is None:
            raise RuntimeError("the stack is in no model, so there is nothing to train")
        then(owner)

    when_taken(stack, operator.is_, lambda parent: model.append(weakref.ref(parent)))
    stack.finish_init = finish_init  # type: ignore[assignment]


_AT_COMPLETION: list[Callable[[Any], None]] = []


@contextmanager
def completing(then: Callable[[Any], None]) -> Iterator[None]:
    """Call `then(model)` for each model with a stack of ours that is built inside, when it is complete."""
    _AT_COMPLETION.append(then)
    try:
        yield
    finally:
        _AT_COMPLETION.pop()


def announce_completion(stack: torch.nn.Module) -> None:
    """Let the functions of `completing` see the model that this stack is put into."""
    for then in _AT_COMPLETION:
        when_complete(stack, then)


def keep_argument(name: str, value: str) -> None:
    """Put a value into Megatron's global arguments, which a checkpoint stores, if there are any."""
    if (arguments := _global_arguments()) is not None:
        setattr(arguments, name, value)


def argument(name: str) -> Any:
    """Value of one of Megatron's global arguments; None if there are none."""
    return getattr(_global_arguments(), name, None)


def _global_arguments() -> Any:
    training = sys.modules.get("megatron.training.global_vars")
    return None if training is None else training._GLOBAL_ARGS
