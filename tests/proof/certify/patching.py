"""Replace a function of Megatron or of this package for the life of a process of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock


def attribute(path: str) -> Any:
    """An attribute of a module: "package.module.Name"."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute with what `make` returns for it.

    Args:
        owner: a class, or the import path of a module.
    """
    target = importlib.import_module(owner) if isinstance(owner, str) else owner
    static = isinstance(vars(target).get(name), staticmethod)
    new = make(getattr(target, name))
    mock.patch.object(target, name, staticmethod(new) if static else new).start()


def in_place_of(owner: Any, name: str, new: Any) -> None:
    """Replace an attribute."""
    wrap(owner, name, lambda _original: new)


def result(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change what a function returns."""
    wrap(owner, name, lambda original: lambda *args, **kwargs: change(original(*args, **kwargs)))


def arguments(owner: Any, name: str, **other: Any) -> None:
    """Give a function other keyword arguments."""
    wrap(owner, name, lambda original: lambda *args, **kwargs: original(*args, **(kwargs | other)))


def then(owner: Any, name: str, act: Callable[[Any], Any]) -> None:
    """Act on an object after one of its methods."""

    def make(method: Any) -> Any:
        def both(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(self, *args, **kwargs)
            act(self)
            return found

        return both

    wrap(owner, name, make)
