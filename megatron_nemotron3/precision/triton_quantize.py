"""Fake quantization in Triton: `quantizer` on CUDA in two kernels, instead of some thirty operations.

    magnitudes   amax of the blocks; before it the rotation, written in the dtype of x
    finish       scales of the blocks and the rounded values; in MXFP8 also the amax of the blocks

Rounding to nearest equals the torch path bit for bit, if its product adds the 16 terms of a rotation in their
order, as on the CPUs where this was tested. Stochastic rounding has the same rule with numbers of Philox; its
key is a draw from the generator, so recomputation, checkpoints and CUDA graphs replay them. With
`finish(bits=...)` it equals the torch path, too. Tested in Triton's interpreter and compiled for SM 9.0 and
10.0; not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from megatron_nemotron3.precision import blocks as cut
from megatron_nemotron3.precision import triton_quantize_kernels as kernels
from megatron_nemotron3.precision.recipe import Spec

#: Numbers of blocks are int32.
MAX_ELEMENTS = 2**34
#: Maximum number of blocks, and of columns of a group, per program, by kernel: as large as registers allow
#: (ptxas, SM 9.0 and 10.0). Not timed.
ROWS = {"magnitudes": 256, "finish": 64}
COLUMNS = {"magnitudes": 512, "rotate": 512, "finish": 1024, "stochastic": 512}


def magnitudes(x: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Find the amax of the blocks; rotate x before, if `spec` says so.

    Returns: x or its rotated copy, in the dtype of x; amax of the blocks, float32, the block grid flattened.
    """
    count = x.numel() // (spec.block**2 if spec.tile else spec.block)
    largest = torch.empty(count, dtype=torch.float32, device=x.device)
    if spec.hadamard:
        rotated = torch.empty_like(x)
        columns, along, across = (count, 1, spec.block) if _by_rows(spec) else (x.shape[-1], x.shape[-1], 1)
        programs, sizes, meta = _columns(x, spec, "rotate", columns)
        _launch(kernels.rotate, programs, x, rotated, largest, *sizes, along, across, **meta)
        return rotated, largest
    if _by_rows(spec):
        rows = ROWS["magnitudes"]
        programs = triton.cdiv(count, rows)
        _launch(kernels.magnitudes_of_rows, programs, x, largest, count, BLOCK=spec.block, ROWS=rows)
    else:
        programs, sizes, meta = _columns(x, spec, "magnitudes", x.shape[-1])
        _launch(kernels.magnitudes_of_columns, programs, x, largest, *sizes, TILE=_tile(spec), **meta)
    return x, largest


def finish(
    x: Tensor,
    spec: Spec,
    block_amax: Tensor | None,
    amax: Tensor | None,
    out: Tensor,
    *,
    units: bool = False,
    generator: torch.Generator | None = None,
    bits: Tensor | None = None,
) -> Tensor:
    """Round x to the format: grid(x * encode) * decode, written to `out`, which is returned.

    Args:
        block_amax: float32, on the block grid; None in MXFP8, whose kernel finds it.
        amax: float32, broadcasts to the block grid; None in MXFP8.
        generator: of the device of x, for stochastic rounding; None means torch's own.
        bits: int16, odd, of the shape of x, for stochastic rounding instead of Philox.
    """
    seed = None
    if spec.stochastic and bits is None:
        seed = torch.empty(1, dtype=torch.int64, device=x.device).random_(-(2**63), None, generator=generator)
    per, each = 1, False
    if amax is not None:
        shape = cut.grid_shape(x, spec)
        amax, per = _spread(amax, shape)
        # Columns: a group reads one amax where its blocks share it.
        each = amax.numel() > 1 and (_by_rows(spec) or per % shape[-1] != 0)
    tensors = (x, out, block_amax, amax, seed, bits if spec.stochastic else None)
    kind = {"EACH": each, "UNITS": units, "NVFP4": spec.format == "nvfp4"}
    if _by_rows(spec):
        count, rows = x.numel() // spec.block, ROWS["finish"]
        programs = triton.cdiv(count, rows * kernels.PARTS.value)
        _launch(kernels.finish_rows, programs, *tensors, count, per, BLOCK=spec.block, ROWS=rows, **kind)
    else:
        name = "finish" if seed is None else "stochastic"
        programs, sizes, meta = _columns(x, spec, name, x.shape[-1])
        _launch(kernels.finish_columns, programs, *tensors, *sizes, per, TILE=_tile(spec), **meta, **kind)
    return out


def _by_rows(spec: Spec) -> bool:
    return spec.axis == -1 and not spec.tile


def _tile(spec: Spec) -> int:
    return spec.block if spec.tile else 1


def _columns(x: Tensor, spec: Spec, name: str, columns: int) -> tuple[int, tuple[int, int], dict[str, int]]:
    """(programs, (columns, chunks of them), BLOCK and COLUMNS) of a kernel of columns."""
    size = min(COLUMNS[name], max(spec.block, triton.next_power_of_2(columns)))
    chunks = triton.cdiv(columns, size)
    groups = x.numel() // (spec.block * columns)
    return groups * chunks, (columns, chunks), {"BLOCK": spec.block, "COLUMNS": size}


def _spread(amax: Tensor, shape: list[int]) -> tuple[Tensor, int]:
    """(amax contiguous, n): the amax of block b of a grid of `shape` is entry b // n."""
    sizes = [1] * (len(shape) - amax.ndim) + list(amax.shape)
    kept = next((i + 1 for i in reversed(range(len(sizes))) if sizes[i] != 1), 0)
    per = 1
    for size in shape[kept:]:
        per *= size
    return amax.view(sizes).expand(shape[:kept] + sizes[kept:]).contiguous(), per


def _launch(kernel: Any, programs: int, x: Tensor, /, *arguments: Any, **meta: Any) -> None:
    # Each product and each sum is rounded, as in torch.
    with torch.cuda.device(x.device if x.is_cuda else -1):
        kernel[(programs,)](x, *arguments, **meta, enable_fp_fusion=False)
