"""Grouped products of emulated experts in Triton: accumulated in FP32, scaled, and rounded once.

torch's grouped product would round to BF16 before the scale. The host does not wait for the rows of an
expert. Tested in Triton's interpreter and compiled for SM 9.0 and 10.0; not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Rows, columns and terms of a tile, and warps of a program. Not timed.
ROWS, COLUMNS, TERMS, WARPS = 128, 128, 64, 8


def rows_product(
    x: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """y[rows of expert e] = x[rows of expert e] @ weights[e].T * scale: [t, n] in `dtype`.

    Args:
        x: [t, k], contiguous.   weights: [E, n, k], any strides.   scale: [t] FP32, or None for 1.
        starts, ends: [E], int32, the rows of each expert; together all of x.
    """
    (t, k), (number, n, _) = x.shape, weights.shape
    y = torch.empty(t, n, dtype=dtype, device=x.device)
    if not y.numel():
        return y
    # A tile has rows of one expert only, so there are at most so many tiles.
    tiles = (ends - starts + (ROWS - 1)) // ROWS
    last = tiles.cumsum(0)
    tile = torch.arange(t // ROWS + number, device=x.device)
    expert = torch.searchsorted(last, tile, right=True).clamp_(max=number - 1)
    first = starts[expert] + (tile - (last - tiles)[expert]) * ROWS
    grid = (len(tile), triton.cdiv(n, COLUMNS))
    sizes = (n, k, *weights.stride())
    tensors = (x, weights, scale, y, expert.to(torch.int32), first.to(torch.int32), ends)
    _launch(_rows_kernel, grid, *tensors, *sizes)
    return y


def weight_gradients(
    dy: Tensor, x: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """dw[e] = dy[rows of expert e].T @ x[rows of expert e] * scale[e], [E, n, k] in `dtype`; 0 without rows.

    Args:
        dy, x: [t, n] and [t, k], contiguous.   scale: [E] FP32, or None for 1.
        starts, ends: [E], int32, the rows of each expert.
    """
    n, k = dy.shape[1], x.shape[1]
    dw = torch.empty(len(ends), n, k, dtype=dtype, device=x.device)
    if dw.numel():
        grid = (len(ends), triton.cdiv(n, ROWS) * triton.cdiv(k, COLUMNS))
        _launch(_weight_kernel, grid, dy, x, scale, dw, starts, ends, n, k)
    return dw


def _launch(kernel: Any, grid: tuple[int, int], x: Tensor, *arguments: Any) -> None:
    with torch.cuda.device(x.device if x.is_cuda else -1):
        kernel[grid](x, *arguments, ROWS=ROWS, COLUMNS=COLUMNS, TERMS=TERMS, num_warps=WARPS)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, w, scale, y, expert, first, ends, n, k, w_e, w_n, w_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One tile [ROWS, COLUMNS] of y; a program has nothing to do where its first row is behind its expert."""
    tile = tl.program_id(0)
    e = tl.load(expert + tile).to(tl.int64)
    start, end = tl.load(first + tile), tl.load(ends + e)
    if start < end:
        row, col = start + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside, among = row < end, col < n
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, k, TERMS):
            term = begin + tl.arange(0, TERMS)
            known = term < k
            a = tl.load(
                x + row.to(tl.int64)[:, None] * k + term[None, :],
                mask=inside[:, None] & known[None, :],
                other=0.0,
            )
            b = tl.load(
                w + e * w_e + term.to(tl.int64)[:, None] * w_k + col[None, :] * w_n,
                mask=known[:, None] & among[None, :],
                other=0.0,
            )
            total += tl.dot(a, b)
        if scale is not None:
            total *= tl.load(scale + row, mask=inside, other=0.0)[:, None]
        tl.store(
            y + row.to(tl.int64)[:, None] * n + col[None, :], total, mask=inside[:, None] & among[None, :]
        )


@triton.jit
def _weight_kernel(  # type: ignore[no-untyped-def]
    dy, x, scale, dw, starts, ends, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr
):
    """One tile [ROWS, COLUMNS] of an expert's gradient [n, k]: a sum over its rows."""
    e, across = tl.program_id(0).to(tl.int64), tl.cdiv(k, COLUMNS)
    i = tl.program_id(1) // across * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) % across * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(starts + e), tl.load(ends + e)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(start, end, TERMS):
        row = begin + tl.arange(0, TERMS)
        inside, at = row < end, row.to(tl.int64)
        a = tl.load(dy + at[None, :] * n + i[:, None], mask=inside[None, :] & (i < n)[:, None], other=0.0)
        b = tl.load(x + at[:, None] * k + j[None, :], mask=inside[:, None] & (j < k)[None, :], other=0.0)
        total += tl.dot(a, b)
    if scale is not None:
        total *= tl.load(scale + e)
    tl.store(dw + e * n * k + i[:, None] * k + j[None, :], total, mask=(i < n)[:, None] & (j < k)[None, :])
