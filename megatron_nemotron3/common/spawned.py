"""Run a script, and be what multiprocessing imports as the main module of a process that the script spawns.

`run_script` names this module in `__main__.__spec__`. In a spawned process it ties the process to its parent.
The script itself is loaded if the process needs something of it: Megatron's checkpoint writer needs nothing,
and importing torch and Megatron would cost it seconds and half a gigabyte.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_nemotron3.common.processes import as_spawned
from megatron_nemotron3.common.switches import SCRIPT

_of_the_script: dict[str, Any] = {}

if __name__ == "__mp_main__":
    as_spawned()


def run_script(script: str) -> None:
    """Run a script as `__main__`, as `python SCRIPT` does.

    Processes that it spawns import this module in its place.
    """
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__file__, module.__package__ = script, ""
    module.__spec__ = importlib.util.find_spec(__name__)
    os.environ[SCRIPT] = os.path.abspath(script)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = before


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are spawned inside the block import this module in place of the running script."""
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, importlib.util.find_spec(__name__)
    try:
        yield
    finally:
        main.__spec__ = before


def __getattr__(name: str) -> Any:
    """What a pickle wants of `__main__`."""
    if __name__ != "__mp_main__" or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _of_the_script:
        _of_the_script.update(runpy.run_path(os.environ[SCRIPT], run_name="__mp_main__"))
    if name not in _of_the_script:
        raise AttributeError(f"{os.environ[SCRIPT]} has no attribute {name!r}")
    return _of_the_script[name]
