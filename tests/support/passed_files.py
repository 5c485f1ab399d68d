"""Count the files of the package of which a command calls a function, in any of its processes.

python tests/support/passed_files.py convert to-hf runs/demo/checkpoints hf
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

#: Each process of the command appends a file of the package to a list when it first calls a function of it.
_STARTUP = """
import inspect, os, sys
function, seen = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS, set()
def called(code, offset):
    name = code.co_filename.rpartition("/megatron_nemotron3/")
    if name[1] and code.co_flags & function == function and name[2] not in seen:  # not the body of a class
        seen.add(name[2])
        with open(os.environ["PASSED_FILES"], "a") as out:
            out.write(name[2] + "\\n")
    return sys.monitoring.DISABLE
sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "passed files")
sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START, called)
sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START)
"""


def passed_files(arguments: list[str]) -> list[str]:
    """Files below megatron_nemotron3/ in the order in which `nemotron3 ARGUMENTS` first calls them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_STARTUP, encoding="utf-8")
        out = Path(folder, "files")
        path = os.pathsep.join([folder, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PASSED_FILES": str(out)}
        command = [sys.executable, "-m", "megatron_nemotron3", *arguments]
        subprocess.run(command, env=environment, check=False, stdout=sys.stderr)
        return list(dict.fromkeys(out.read_text(encoding="utf-8").split()))


if __name__ == "__main__":
    files = passed_files(sys.argv[1:])
    print("\n".join(files), f"\n{len(files)} files")
