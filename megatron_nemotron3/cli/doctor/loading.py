"""Imports each kernel package in a separate process, and explains in one sentence why an import fails.

A package built for another torch, CUDA or machine fails in the dynamic linker, sometimes with a signal. So
each import has its own process, and a table translates the linker's messages.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_nemotron3.cli.doctor.finding import DoctorFinding


@dataclass(frozen=True)
class Probe:
    """An import to try.

    package: name of the distribution.
    top: top-level module that exists if the package is installed.
    module: module whose import loads the package's binaries.
    build: command that builds the package for the installed torch.
    """

    package: str
    top: str
    module: str
    build: str


_BUILD = "pip install --no-build-isolation --no-cache-dir --no-binary :all: --no-deps"
PROBES = (
    Probe("torch", "torch", "torch", "pip install torch==2.11.0"),
    Probe("megatron-core", "megatron", "megatron.core", "pip install 'megatron-core[training]==0.19.2'"),
    Probe(
        "transformer-engine",
        "transformer_engine",
        "transformer_engine.pytorch",
        "pip install --no-build-isolation --no-cache-dir 'transformer-engine[pytorch]'",
    ),
    Probe(
        "mamba-ssm",
        "mamba_ssm",
        "mamba_ssm.ops.triton.ssd_combined",
        f"MAMBA_FORCE_BUILD=TRUE {_BUILD} mamba-ssm",
    ),
    Probe(
        "causal-conv1d",
        "causal_conv1d",
        "causal_conv1d_cuda",
        f"CAUSAL_CONV1D_FORCE_BUILD=TRUE {_BUILD} causal-conv1d",
    ),
    Probe("apex", "apex", "amp_C", "build apex from source with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"),
    Probe(
        "flash-attn",
        "flash_attn",
        "flash_attn_2_cuda",
        f"FLASH_ATTENTION_FORCE_BUILD=TRUE {_BUILD} flash-attn",
    ),
    Probe("nvidia-modelopt", "modelopt", "modelopt.torch.quantization", "pip install nvidia-modelopt"),
    Probe("transformers", "transformers", "transformers", "pip install 'transformers>=5.15.1'"),
)
#: (pattern in the error of an import, its meaning); the first match counts. {0}, {1}: groups of the pattern.
MEANINGS: tuple[tuple[str, str], ...] = (
    (r"undefined symbol: (\S+)", "built against another torch (symbol {0} is missing): rebuild it"),
    (r"(lib(?:cud|cu|nv)\S*\.so\.(\d+)\S*): cannot open", "needs {0} of CUDA {1}, which is not installed"),
    (r"(lib\S+\.so\S*): cannot open shared object", "needs the library {0}, which is not installed"),
    (r"version [`'](GLIBC\S*)' not found", "built on a newer system ({0}): rebuild it on this one"),
    (r"(?:invalid ELF header|wrong ELF class|Exec format error)", "built for another kind of processor"),
    (
        r"no kernel image is available",
        "has no kernels for this GPU: rebuild it with this GPU in TORCH_CUDA_ARCH_LIST",
    ),
    (r"FileNotFoundError: (.*)", "a file is missing ({0}): the package is installed only in part"),
    (r"ModuleNotFoundError: No module named '([^']+)'", "module {0} is missing"),
    (
        r"ImportError: cannot import name '([^']+)' from '([^']+)'",
        "needs {0} of {1}, which the installed version lacks",
    ),
)


def meaning(error: str) -> str:
    """One sentence that explains the stderr of a failed import."""
    for pattern, sentence in MEANINGS:
        if found := re.search(pattern, error):
            return sentence.format(*found.groups())
    last = error.strip().splitlines()
    return last[-1][:200] if last else "failed without a message"


def load(probe: Probe, timeout: float = 180) -> DoctorFinding:
    """Import a package in another process."""
    if find_spec(probe.top) is None:
        return DoctorFinding(probe.package, "absent", "not installed")
    code = f"import importlib; importlib.import_module({probe.module!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode == 0:
            return DoctorFinding(probe.package, "ok", f"import {probe.module}")
        problem = f": {meaning(done.stderr)}"
        if done.returncode < 0:
            problem = f" ends with {signal.Signals(-done.returncode).name}"
    except subprocess.TimeoutExpired:
        problem = f" did not finish in {timeout:.0f} s"
    return DoctorFinding(probe.package, "error", f"import {probe.module}{problem}", probe.build)


def load_all() -> list[DoctorFinding]:
    """Try all imports, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(load, PROBES))
