"""State-space duality (SSD) scan of Mamba-2, arXiv 2405.21060. Plain torch: CPU and GPU.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t (x) B_t        state  [p, n] per head
    y_t = h_t C_t + D x_t                               output [p]    per head

    ssd_reference   the recurrence, one token at a time (section 2): the specification
    ssd_chunked     the fast form: matrix products (section 6), hand-written backward
    ssd_step        one token of decoding
    select_scan     the form for a device and dtype: on CUDA in BF16 and FP16 mamba-ssm's kernel, if it is
                    installed (in FP32 its products would round to TF32), else `ssd_chunked`

Shapes are those of the mamba-ssm kernels, so that a kernel can replace either:

    x [b, s, h, p]   dt [b, s, h] (> 0)   A [h] (< 0)   B, C [b, s, g, n]   D [h]   state [b, h, p, n]

Head i belongs to group i // (h // g). Products, decays and state are FP32 (FP64 if x is FP64); y has the
dtype of x, every gradient the dtype of its input.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.layers.chunked_scan import ChunkedScan, Places, ScanInputs, document_starts
from megatron_nemotron3.layers.functional import accumulation_dtype


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Document index [1, total] (int32) from cumulative lengths [0, n_1, n_1 + n_2, ...] (THD packing).

    Tokens from `cu_seqlens[-1]` on are padding and form a document of their own. Documents may be empty.
    """
    position = torch.arange(total, device=cu_seqlens.device)
    ends = cu_seqlens[1:].to(position.dtype).contiguous()
    return torch.searchsorted(ends, position, right=True, out_int32=True).unsqueeze(0)


def ssd_reference(
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
    """The recurrence, token by token. Slow, for tests; arguments, result and errors as for `ssd_chunked`."""
    inputs = ScanInputs(x, dt, A, B, C, D, initial_state, seq_idx)
    inputs.check()
    acc, dtype = inputs.acc, x.dtype
    state = inputs.state(initial_state)
    starts = None if seq_idx is None else document_starts(seq_idx)
    # Cast before the loop, so that autograd sums gradients over tokens in FP32 and rounds once.
    x, dt, A, B, C = (t.to(acc) for t in (x, dt, A, B, C))
    D = None if D is None else D.to(acc)
    outputs = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], 0.0, state)
        y, state = ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], D, state)
        outputs.append(y)
    y = torch.stack(outputs, dim=1).to(dtype)
    return (y, state) if return_final_state else y


def ssd_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: y [b, h, p] in the dtype of x, and the new state.

    Args:
        x: [b, h, p].   dt: [b, h], after softplus.   A: [h].   B, C: [b, g, n].   D: [h] or None.
        state: [b, h, p, n], FP32 (FP64 for FP64 inputs). Not modified.
    """
    acc = accumulation_dtype(x)
    heads_per_group = x.shape[1] // B.shape[1]
    x_, dt_ = x.to(acc), dt.to(acc)
    B_, C_ = (m.to(acc).repeat_interleave(heads_per_group, dim=1).unsqueeze(-2) for m in (B, C))
    decay = torch.exp(dt_ * A.to(acc))
    state = decay[..., None, None] * state.to(acc) + (dt_.unsqueeze(-1) * x_).unsqueeze(-1) * B_
    y = (state * C_).sum(-1)
    if D is not None:
        y = y + D.to(acc).unsqueeze(-1) * x_
    return y.to(x.dtype), state


def ssd_chunked(
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
    gradients: Places = (None, None, None),
) -> Any:
    """The scan as matrix products over chunks; differentiable once.

    Args:
        x: [b, s, h, p], any s >= 1.   D: [h], skip connection, or None.
        dt: [b, s, h], time step after softplus, >= 0.   A: [h], negative.
        B, C: [b, s, g, n], h divisible by g.
        chunk_size: ignored; it is part of the kernels' signature. Chunks have `CHUNK` tokens.
        initial_state: [b, h, p, n], or None for zeros. It belongs to the document of the first token.
        seq_idx: [b, s] integer document index, non-decreasing. The state is zero where it changes.
        gradients: memory for the gradients of x, B and C; None: new memory.

    Returns:
        y [b, s, h, p] in the dtype of x; with `return_final_state` also the state [b, h, p, n] in FP32
        (FP64 if x is FP64).
    """
    inputs = ScanInputs(x, dt, A, B, C, D, initial_state, seq_idx)
    inputs.check()
    y, state = ChunkedScan.apply(*inputs, gradients)
    return (y, state) if return_final_state else y


#: dtypes of x that libraries' kernels are used for.
HALF = (torch.bfloat16, torch.float16)


def select_scan(x: Tensor) -> Callable[..., Any]:
    """The fastest scan for the device and dtype of x. Cheap enough for every step."""
    kernel = mamba_ssm() if x.is_cuda and x.dtype in HALF else None
    return ssd_chunked if kernel is None else kernel


@cache
def mamba_ssm() -> Callable[..., Any] | None:
    """mamba-ssm's scan with the signature of `ssd_chunked`, None if it is not installed."""
    module = library("mamba_ssm.ops.triton.ssd_combined")
    return None if module is None else mamba_ssm_scan(module)


def library(name: str) -> Any:
    """A module of an optional package, None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    # A package built for another torch fails with any of these.
    except (ImportError, OSError, RuntimeError):
        return None


def mamba_ssm_scan(module: Any) -> Callable[..., Any]:
    """`mamba_chunk_scan_combined` of `module` with our signature.

    Its `initial_states` belong to document 0 and ours to the first token's, so documents are renumbered from
    0. B and C must have the dtype of x, and states between chunks are rounded to it in the output.
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
            D=None if D is None else D.float().contiguous(),  # its backward refuses another stride
            initial_states=None if initial_state is None else initial_state.float(),
            seq_idx=seq_idx,
            dt_softplus=False,
            return_final_states=return_final_state,
        )

    return scan
