"""What ptxas says of a kernel that Triton compiled for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Use(NamedTuple):
    """Of one program."""

    registers: int  # of a thread
    #: Bytes of a thread that do not fit in registers and go to memory, stored and loaded.
    spilled: int


def use(compiled: Any, target: int) -> Use:
    """Registers and spills of `triton.compile`'s result, by the ptxas that Triton ships for this target."""
    import triton

    name = "ptxas-blackwell" if target >= 100 else "ptxas"
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [program, "-v", f"--gpu-name=sm_{target}a", source, "-o", Path(folder) / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return Use(max(map(int, registers)), sum(map(int, spilled)))
