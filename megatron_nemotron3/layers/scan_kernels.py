"""Selection of the SSD scan: mamba-ssm's kernels or plain torch, with one signature.

The first one that supports device and dtype is used:

    mamba-ssm     CUDA, BF16 and FP16, if `mamba_ssm.ops.triton.ssd_combined` can be imported. Not for FP32,
                  since its products round FP32 factors to TF32 (10 bits).
    torch         everywhere: `ssd.ssd_chunked`
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.layers.chunked_scan import ScanInputs, document_starts
from megatron_nemotron3.layers.ssd import ssd_chunked


@dataclass(frozen=True)
class Scan:
    """A callable with the signature of `ssd.ssd_chunked`, and its name for the log line."""

    name: str
    function: Callable[..., Any]
    dtypes: frozenset[torch.dtype]  # of x

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


HALF = frozenset({torch.bfloat16, torch.float16})
TORCH = Scan("torch chunked SSD", ssd_chunked, HALF | {torch.float32, torch.float64})


def select_scan(x: Tensor) -> Scan:
    """The fastest scan for the device and dtype of x [b, s, h, p]. Cheap enough for every step."""
    if not x.is_cuda:
        return TORCH
    return next(scan for scan in cuda_scans() if x.dtype in scan.dtypes)


@cache
def cuda_scans() -> tuple[Scan, ...]:
    """The scans that can run on CUDA here, fastest first; the last is plain torch."""
    return tuple(scan for scan in (_installed_mamba_ssm(), TORCH) if scan is not None)


def _installed_mamba_ssm() -> Scan | None:
    try:
        module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    # A package built for another torch fails with any of these.
    except (ImportError, OSError, RuntimeError):
        return None
    return mamba_ssm_scan(module)


def mamba_ssm_scan(module: ModuleType | Any) -> Scan:
    """`mamba_chunk_scan_combined` of `module` with our signature.

    It differs in three points. Its `initial_states` belong to document 0 and are ignored if the first token
    has another index, whereas ours belong to the first token's document; so documents are renumbered from 0.
    B and C must have the dtype of x. States between chunks are rounded to the dtype of C where they enter the
    output; initial and final states are FP32.
    """
    kernel = module.mamba_chunk_scan_combined

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        chunk_size: int = 128,
        initial_state: Tensor | None = None,
        seq_idx: Tensor | None = None,
        return_final_state: bool = False,
    ) -> Any:
        ScanInputs(x, dt, A, B, C, D, initial_state, seq_idx).check()
        if seq_idx is not None:
            seq_idx = document_starts(seq_idx).cumsum(1, dtype=torch.int32)
        return kernel(
            x,
            dt.float(),  # after softplus
            A.float(),
            B.to(x.dtype),
            C.to(x.dtype),
            chunk_size,
            D=None if D is None else D.float(),
            initial_states=None if initial_state is None else initial_state.float(),
            seq_idx=seq_idx,
            dt_softplus=False,
            return_final_states=return_final_state,
        )

    return Scan("mamba-ssm Triton SSD", scan, HALF)
