"""Imports every kernel package in a process of its own, and says in one sentence why one cannot be loaded.

A package built for another torch, CUDA or machine fails in the dynamic linker, sometimes with a signal: hence
processes, and a table from what the linker says to what it means.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_nemotron3.doctor.finding import Finding


@dataclass(frozen=True)
class Probe:
    """package: its distribution. top: what must be found for it to be there. module: what loads its binaries.
    build: the command that builds it for the torch that is here."""

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
#: What an import prints last -> what it means; the first that is found counts. {0}…: groups of the pattern.
MEANINGS: tuple[tuple[str, str], ...] = (
    (r"undefined symbol: (\S+)", "built against another torch (symbol {0} is not there): build it again"),
    (r"(lib(?:cud|cu|nv)\S*\.so\.(\d+)\S*): cannot open", "wants {0}, of CUDA {1}, which is not here"),
    (r"(lib\S+\.so\S*): cannot open shared object", "wants the library {0}, which is not here"),
    (r"version [`'](GLIBC\S*)' not found", "built on a newer system ({0}): build it here"),
    (r"(?:invalid ELF header|wrong ELF class|Exec format error)", "built for another kind of processor"),
    (r"no kernel image is available", "has no kernels for this GPU: build it with its TORCH_CUDA_ARCH_LIST"),
    (r"FileNotFoundError: (.*)", "a file of it is missing ({0}): installed in part only"),
    (r"ModuleNotFoundError: No module named '([^']+)'", "module {0} is missing"),
    (
        r"ImportError: cannot import name '([^']+)' from '([^']+)'",
        "wants {0} of {1}, which this version lacks",
    ),
)


def meaning(error: str) -> str:
    """One sentence for the end of a failed import's stderr."""
    for pattern, sentence in MEANINGS:
        if found := re.search(pattern, error):
            return sentence.format(*found.groups())
    last = error.strip().splitlines()
    return last[-1][:200] if last else "failed without a word"


def load(probe: Probe, timeout: float = 180) -> Finding:
    """Import it, elsewhere."""
    if find_spec(probe.top) is None:
        return Finding(probe.package, "absent", "not installed")
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"import importlib; importlib.import_module({probe.module!r})",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Finding(
            probe.package, "error", f"import {probe.module} did not end in {timeout:.0f} s", probe.build
        )
    if done.returncode == 0:
        return Finding(probe.package, "ok", f"import {probe.module}")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Finding(probe.package, "error", f"import {probe.module} ends with {name}", probe.build)
    return Finding(probe.package, "error", f"import {probe.module}: {meaning(done.stderr)}", probe.build)


def load_all(probes: Sequence[Probe] = PROBES) -> list[Finding]:
    """All of them, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(load, probes))
