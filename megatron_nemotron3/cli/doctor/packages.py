"""Table of package versions that are known to fail or to cause trouble.

Each row was reproduced or confirmed by a maintainer; `why` says what happens. For versions that were not
tried the doctor reports which version was tested.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from megatron_nemotron3.cli.doctor.finding import DoctorFinding, Level

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
    "causal-conv1d": "stock Megatron's Mamba layers",
    "apex": "fused Adam where TransformerEngine is absent",
    "transformers": "tokenizers; comparison of logits",
    "nvidia-modelopt": "quantized checkpoints",
    "flash-attn": "another attention of TransformerEngine",
}
NEEDED = ("torch", "megatron-core")
Version = tuple[int, ...]


@dataclass(frozen=True)
class PackageRule:
    """A combination of versions that is known to fail or to cause trouble.

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


def _version_between(
    name: str, low: Version | None, high: Version | None
) -> Callable[[Mapping[str, Version]], bool]:
    """A condition: low <= version of the package < high."""

    def applies(have: Mapping[str, Version]) -> bool:
        version = have.get(name)
        if version is None:
            return False
        return (low is None or version >= low) and (high is None or version < high)

    return applies


RULES = (
    PackageRule(
        "python",
        "error",
        lambda have: have.get("megatron-core", ()) >= (0, 17) and have["python"] < (3, 12),
        "megatron-core needs Python 3.12",
        "make the environment with python3.12",
    ),
    PackageRule(
        "megatron-core",
        "error",
        _version_between("megatron-core", None, (0, 19)),
        "older than 0.19, the first version supported (docs/environment.md)",
        "pip install 'megatron-core[training]==0.19.2'",
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
        _version_between("transformers", (5, 3), (5, 15)),
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
        _version_between("transformer-engine", None, (2, 7)),
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


def compiled() -> list[DoctorFinding]:
    """A warning if every process compiles torch's Python files again, because the result cannot be stored."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None or os.path.exists(cache := util.cache_from_source(spec.origin)):
        return []
    if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
        return []  # the next import stores it
    reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{cache} cannot be written"
    return [
        DoctorFinding(
            "python",
            "warning",
            f"{reason} and torch is not compiled to bytecode, so every rank compiles torch and Megatron when "
            "it starts, which takes longer than their import",
            f"python -m compileall -q -j 0 {Path(spec.origin).parents[1]}",
        )
    ]
