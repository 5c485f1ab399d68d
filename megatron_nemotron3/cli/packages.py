"""The doctor's checks of packages: their versions, and whether each can be imported.

A package built for another torch, CUDA or machine fails in the dynamic linker, sometimes with a signal. So
each import has its own process, and a table translates the linker's messages.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util
from typing import Literal

#: "error": training will fail; the exit code is 1. "warning": training works with a loss or a risk. "absent":
#: an optional package or device is missing.
Level = Literal["ok", "absent", "warning", "error"]


@dataclass(frozen=True)
class DoctorFinding:
    """One result of a check.

    subject: a package, "gpu", a kernel or "step".
    cure: what to do, often a command; "" if there is nothing to do.
    """

    subject: str
    level: Level
    message: str
    cure: str = ""


#: Versions that this release is tested with.
TESTED = {
    "python": "3.12",
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "transformers": "5.24.0",
    "transformer-engine": "2.20.2",
    "nvidia-modelopt": "0.47.0",
}
#: Distribution -> its purpose. Only the first two are required.
PURPOSE = {
    "torch": "all computation",
    "megatron-core": "model, parallelism, training loop",
    "triton": "megatron-core imports it; our GPU kernels",
    "transformer-engine": "the te backend: fast linears, FP8 and FP4 on GPUs",
    "mamba-ssm": "a fast scan, and stock Megatron's Mamba layers",
    "causal-conv1d": "a fast convolution, and stock Megatron's Mamba layers",
    "apex": "fused Adam where TransformerEngine is absent",
    "transformers": "tokenizers; comparison of logits",
    "nvidia-modelopt": "quantized checkpoints",
    "flash-attn": "another attention of TransformerEngine",
}
NEEDED = ("torch", "megatron-core")
Version = tuple[int, ...]


@dataclass(frozen=True)
class PackageRule:
    """A combination of versions that is known to fail or to cause trouble, reproduced or confirmed by a
    maintainer; `why` says what happens.

    applies: takes package -> version of the installed packages.
    """

    subject: str
    level: Level
    applies: Callable[[Mapping[str, Version]], bool]
    why: str
    cure: str


def parse(text: str) -> Version:
    """The leading numbers of a version: "5.15.1rc0" -> (5, 15, 1)."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


RULES = (
    PackageRule(
        "python",
        "error",
        lambda have: have.get("megatron-core", (0, 19)) >= (0, 17) and have["python"] < (3, 12),
        "megatron-core needs Python 3.12",
        "make the environment with python3.12",
    ),
    PackageRule(
        "megatron-core",
        "error",
        lambda have: have.get("megatron-core", (0, 19)) < (0, 19),
        "older than 0.19, the first version supported (docs/environment.md)",
        "pip install 'megatron-core[training]==0.19.2'",
    ),
    PackageRule(
        "torch",
        "warning",
        lambda have: have.get("torch", (2, 8)) < (2, 8),
        "older than 2.8, the first version tested: its triton refuses megatron-core's kernels without a GPU",
        "pip install 'torch>=2.8'",
    ),
    PackageRule(
        "triton",
        "error",
        lambda have: have.get("megatron-core", ()) >= (0, 18, 2) and "triton" not in have,
        "megatron-core imports it without declaring it",
        "pip install triton",
    ),
    PackageRule(
        "transformers",
        "warning",
        lambda have: (5, 3) <= have.get("transformers", ()) < (5, 15),
        "its Nemotron-H model computes wrong logits on a CPU",
        "pip install 'transformers>=5.15.1'",
    ),
    PackageRule(
        "transformer-engine",
        "error",
        lambda have: "transformer-engine-core" in have and "transformer-engine-torch" not in have,
        "core libraries without the torch extension: import megatron.core raises FileNotFoundError",
        "pip install --no-build-isolation 'transformer-engine[pytorch]', or uninstall it",
    ),
    PackageRule(
        "transformer-engine",
        "warning",
        lambda have: have.get("transformer-engine", (2, 7)) < (2, 7),
        "too old for NVFP4, for which megatron-core needs 2.7",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
)


def installed() -> dict[str, str]:
    """Distribution -> version text of the packages in `PURPOSE` that are installed, and Python's version."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in PURPOSE or name.startswith("transformer-engine"):
            # The name of the core libraries contains the CUDA version: transformer-engine-cu12.
            key = "transformer-engine-core" if name.startswith("transformer-engine-cu") else name
            found[key] = distribution.version
    return found


def check(have: Mapping[str, str]) -> list[DoctorFinding]:
    """One or more findings for each package of the table; `have` is the result of `installed`."""
    found: list[DoctorFinding] = []
    versions = {name: parse(text) for name, text in have.items()}
    for name in ("python", *PURPOSE):
        broken = [rule for rule in RULES if rule.subject == name and rule.applies(versions)]
        for rule in broken:
            text = f"{have.get(name, 'absent')}: {rule.why}"
            found.append(DoctorFinding(name, rule.level, text, rule.cure))
        if not broken:
            found.append(_unbroken(name, have.get(name)))
    return found


def _unbroken(name: str, version: str | None) -> DoctorFinding:
    if version is None:
        if name in NEEDED:
            return DoctorFinding(name, "error", "not installed", "pip install 'megatron-nemotron3[train]'")
        return DoctorFinding(name, "absent", f"not installed ({PURPOSE[name]})")
    tested = TESTED.get(name)
    same = tested is None or parse(version)[: len(parse(tested))] == parse(tested)
    return DoctorFinding(name, "ok", version + ("" if same else f" (tested with {tested})"))


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
    if util.find_spec(probe.top) is None:
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
