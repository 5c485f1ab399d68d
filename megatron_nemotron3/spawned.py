"""What multiprocessing imports as the main module of a process that a launched script spawns.

`megatron_nemotron3.run` names it in `__main__.__spec__` of the script. It ties the process to its parent. The
script itself is loaded if the process needs something of it: Megatron's checkpoint writer needs nothing, and
importing torch and Megatron would cost it seconds and half a gigabyte.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

from megatron_nemotron3 import lifetime

#: The script that `megatron_nemotron3.run` runs.
SCRIPT = "NEMOTRON3_SCRIPT"

_of_the_script: dict[str, Any] = {}

if __name__ == "__mp_main__":
    lifetime.spawned()


def __getattr__(name: str) -> Any:
    """What a pickle wants of `__main__`."""
    if __name__ != "__mp_main__" or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _of_the_script:
        _of_the_script.update(runpy.run_path(os.environ[SCRIPT], run_name="__mp_main__"))
    if name not in _of_the_script:
        raise AttributeError(f"{os.environ[SCRIPT]} has no attribute {name!r}")
    return _of_the_script[name]
