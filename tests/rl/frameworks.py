"""Checkouts of RL frameworks, named by environment variables, for tests that run their code."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest


def marks(variable: str) -> list[pytest.MarkDecorator]:
    """Marks of a test module that needs the checkout which the variable names."""
    reason = f"{variable} does not name a checkout, or Megatron-Bridge is not installed: make test-rl"
    missing = not os.environ.get(variable) or importlib.util.find_spec("megatron.bridge") is None
    return [pytest.mark.rl, pytest.mark.skipif(missing, reason=reason)]


def use(variable: str) -> Path:
    """Make the packages of a checkout importable."""
    folder = Path(os.environ[variable]).resolve()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def placeholder(name: str, **attributes: Any) -> None:
    """Stand in for a module that is imported for these names and is not used on a CPU."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


def not_here(*_: Any, **__: Any) -> Any:
    """Replaces a function that no test may call."""
    raise AssertionError("a placeholder was called")


def skeleton(folder: Path, name: str) -> None:
    """A package of a checkout without its `__init__`, so that one module of it can be imported."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
