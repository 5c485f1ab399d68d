"""Replace a function of Megatron or of this package for the life of a process of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock


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
