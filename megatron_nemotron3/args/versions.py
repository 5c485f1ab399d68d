"""Which versions of megatron-core are supported, and how their options differ. Standard library only.

Read from the wheel 0.19.2 and from main of 2026-08-22 (0.20.0, in development); docs/environment.md says what
was run on each.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from importlib import metadata

#: Supported minor versions, oldest first; the last one is upstream's main.
KNOWN = ("0.19", "0.20")
#: What flags are made for where no megatron-core is installed.
DEFAULT = "0.19"

#: Options that the parser has from 0.20 on: ours and any that a caller may append.
NEW_IN_0_20 = """
    batch-invariant-backend ckpt-drop-redundant-extra-state
    ckpt-fully-parallel-load-per-rank-objects ckpt-pg-tensors-cache-create
    ckpt-pg-tensors-cache-path disable-save-tokenizer-assets enable-mhc-connections
    gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
    gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
    gtp-remat-reduce-scatter-with-fp32-accumulation megatron-fsdp-version mhc-init-gating-factor
    mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations moe-combine-bwd-dtype
    moe-dispatch-fwd-dtype moe-use-grouped-tensor mtp-hsm muon-use-syrk no-save-tokenizer-assets
    otel-enabled otel-service-name otel-span-groups output-logit-dtype rl-durable-rollout-bank
    rl-max-inflight-requests rl-rollout-bank-dir rl-rollout-bank-max-bytes use-gigatoken
    """

#: Options that the parser of 0.20 no longer has.
REMOVED_IN_0_20 = "disable-stream-ckpt-dequant moe-ncclep-static-shape no-stream-ckpt-dequant"


def minor(version: str) -> str:
    """Return the minor version: "0.19.2" -> "0.19"; "main" is the last of `KNOWN`.

    Raises:
        ValueError: not a version, or one that is not supported.
    """
    if version == "main":
        return KNOWN[-1]
    match = re.match(r"\d+\.\d+", version)
    if match is None:
        raise ValueError(f"megatron-core version {version!r}: give one of {', '.join(KNOWN)} or main")
    if match[0] not in KNOWN:
        raise ValueError(
            f"megatron-core {version} is not supported: use 0.19 (pip install "
            "'megatron-core[training]==0.19.2') or main; checkpoints of older versions remain readable"
        )
    return match[0]


def installed() -> str | None:
    """Return the version of the installed megatron-core without importing it; None if there is none."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def chosen(version: str | None = None) -> str:
    """Return the minor version to make flags for: the given one, else the installed one, else `DEFAULT`.

    Raises:
        ValueError: it is not supported.
    """
    return minor(version or installed() or DEFAULT)


def require_supported() -> None:
    """Check the version of the megatron-core that Python imports; without one there is nothing to check.

    Raises:
        ValueError: it is not supported.
    """
    try:
        version = importlib.import_module("megatron.core").__version__
    except ModuleNotFoundError:
        return
    minor(version)


def unknown_options(options: Iterable[str], version: str) -> dict[str, str]:
    """Return the options that the parser of minor version `version` does not know, each with the reason."""
    names, why = (NEW_IN_0_20, "new in 0.20") if version == "0.19" else (REMOVED_IN_0_20, "removed in 0.20")
    unknown = {f"--{name}" for name in names.split()}
    return {name: why for name in options if name in unknown}
