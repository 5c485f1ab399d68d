"""Fake quantization: what a matrix product on NVFP4 or MXFP8 hardware would see of an operand.

fake_quantize   the values: x rounded to what the format can hold
units           NVFP4 without the tensor's scale: q * s_b, exact in BF16; a product of two such operands,
                accumulated in FP32 and multiplied once by `nvfp4.product_scale`, is the hardware's product

Two readings of x: largest magnitudes of the blocks, then rounding. On a CPU both go piece by piece through
buffers that stay in the second-level cache. No step waits for the device. On CUDA `triton_quantize` does
both if NEMOTRON3_GPU_KERNELS=1 asks for kernels (`settings.gpu_kernels_enabled`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_nemotron3.precision import blocks as cut
from megatron_nemotron3.precision import hadamard, mxfp8, nvfp4
from megatron_nemotron3.precision.settings import gpu_kernels_enabled
from megatron_nemotron3.precision.spec import Spec

#: The largest magnitude to scale by, float32: [] or of a shape that broadcasts to the block grid
#: (`blocks.grid_shape`); or a function that is given the block grid's own and returns it. The function is the
#: place for a reduction over ranks, and for experts that share a tensor but not a scale.
Amax = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


class Units(NamedTuple):
    """values: q * s_b, in the dtype of x, of its shape. amax: float32, the scale of the tensor times 2688."""

    values: torch.Tensor
    amax: torch.Tensor


class Prepared(NamedTuple):
    """x: contiguous. block_amax: float32, the block grid. amax: broadcasts to it, None in MXFP8.
    ours: x is a rotated copy, free to be overwritten."""

    x: torch.Tensor
    block_amax: torch.Tensor
    amax: torch.Tensor | None
    ours: bool


@torch.no_grad()
def fake_quantize(
    x: torch.Tensor,
    spec: Spec,
    generator: torch.Generator | None = None,
    amax: Amax | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantize and dequantize.

    Args:
        x: [..., m, k]; float32, bfloat16 or float16. FP16 and BF16 are computed on in FP32.
        spec: the operand.
        generator: of the device of x, for stochastic rounding; None means torch's own. The draws are taken
            in the order of the elements, so a seed gives the same values on any number of threads. Triton's
            are others (`triton_quantize`).
        amax: see `Amax`; None means that of x (rotated, if the operand is). MXFP8 has none.
        dtype: of the result; None means that of x. NVFP4 values need FP32 to be exact.

    Returns: a new tensor of the shape of x, no gradient. Zeros are positive.

    Raises:
        ValueError: x has no rows and columns, is of another type, or not divisible into blocks; or there is
            an amax for MXFP8.
    """
    dtype = dtype or x.dtype
    if spec.format == "mxfp8" and amax is None and (triton := _triton(x)) is not None:
        cut.check(x, spec)
        x = x.contiguous()
        # One kernel: there is nothing to know of the whole tensor.
        return triton.finish(x, spec, None, None, torch.empty_like(x, dtype=dtype))
    return _values(prepare(x, spec, amax), spec, generator, dtype, units=False)


@torch.no_grad()
def units(
    x: torch.Tensor,
    spec: Spec,
    generator: torch.Generator | None = None,
    amax: Amax | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Units:
    """NVFP4 elements times block scales, without the scale of the tensor; arguments as `fake_quantize`.

    Magnitudes are at most 2688 and have 6 significant bits: exact in BF16, FP16 and FP32, like the product
    of two.

    Raises:
        ValueError: as `fake_quantize`; or the format is not NVFP4.
    """
    if spec.format != "nvfp4":
        raise ValueError(f"{spec.format} has no scale for the whole tensor: use fake_quantize")
    prepared = prepare(x, spec, amax)
    assert prepared.amax is not None
    return Units(_values(prepared, spec, generator, dtype or x.dtype, units=True), prepared.amax)


def prepare(x: torch.Tensor, spec: Spec, amax: Amax | None = None) -> Prepared:
    """Rotate, and find the largest magnitudes. Arguments and errors as `fake_quantize`."""
    cut.check(x, spec)
    if spec.format == "mxfp8" and amax is not None:
        raise ValueError("MXFP8 has no scale for the whole tensor: leave amax out")
    x = x.contiguous()
    shape = cut.grid_shape(x, spec)
    if x.numel():
        triton = _triton(x)
        x, flat = _magnitudes(x, spec) if triton is None else triton.magnitudes(x, spec)
        block_amax = flat.view(shape)
    else:
        block_amax = torch.zeros(shape, device=x.device)
    if spec.format == "mxfp8":
        return Prepared(x, block_amax, None, False)
    if amax is None:
        amax = block_amax.amax() if x.numel() else block_amax.new_zeros(())
    elif not isinstance(amax, torch.Tensor):
        amax = amax(block_amax)
    return Prepared(x, block_amax, amax, spec.hadamard)


def _triton(x: torch.Tensor) -> Any | None:
    """`triton_quantize` where it takes x, imported late, because a CPU has no use for Triton."""
    if not (x.is_cuda and x.numel() and gpu_kernels_enabled()):
        return None
    from megatron_nemotron3.precision import triton_quantize

    return triton_quantize if x.numel() <= triton_quantize.MAX_ELEMENTS else None


def _magnitudes(x: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, rotated if asked, in its dtype; largest magnitudes of the blocks, float32, flat grid)."""
    blocks = cut.view(x, spec)
    rotated = torch.empty_like(x) if spec.hadamard else x
    found = []
    for source, target in cut.pieces(blocks, cut.view(rotated, spec)):
        work = cut.scratch(source, 0)
        if spec.hadamard:
            # To the dtype of x: the hardware's rotation writes BF16, and the maximum is of what it wrote.
            source = target.copy_(hadamard.rotate(source.float(), work))
        if source.dtype == torch.float32:
            torch.abs(source, out=work)
        else:
            work.copy_(source).abs_()
        largest = cut.largest(work)
        found.append(cut.tiles(largest, spec.block) if spec.tile else largest)
    return rotated, found[0] if len(found) == 1 else torch.cat(found)


def _values(
    prepared: Prepared, spec: Spec, generator: torch.Generator | None, dtype: torch.dtype, *, units: bool
) -> torch.Tensor:
    """The rounded x in `dtype`, with the scale of the tensor or (units) without."""
    x, amax = prepared.x, prepared.amax
    out = x if prepared.ours and x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    if not x.numel():
        return out
    if (triton := _triton(x)) is not None:
        return triton.finish(x, spec, prepared.block_amax, amax, out, units=units, generator=generator)
    if amax is None:
        encode, decode = mxfp8.scales(prepared.block_amax)
    else:
        encode, decode = nvfp4.scales(prepared.block_amax, amax)
        decode = decode if units else nvfp4.steps(decode, amax)
    return _finish(x, spec, encode, decode, out, generator)


def _finish(
    x: torch.Tensor,
    spec: Spec,
    encode: torch.Tensor,
    decode: torch.Tensor,
    out: torch.Tensor,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """out = grid(x * encode) * decode, both on the block grid."""
    grid = nvfp4.GRID if spec.format == "nvfp4" else mxfp8.GRID
    blocks = cut.view(x, spec)
    views = (cut.view(out, spec), cut.expand(encode, blocks, spec), cut.expand(decode, blocks, spec))
    for source, target, enc, dec in cut.pieces(blocks, *views):
        # In the result itself where it is FP32: one buffer less in the cache.
        work = target if out.dtype == torch.float32 else cut.scratch(source, 0)
        if source.dtype == torch.float32:
            torch.mul(source, enc, out=work)
        else:
            work.copy_(source).mul_(enc)
        scratch = cut.scratch(source, 1)
        if spec.stochastic:
            grid.round_stochastic_(work, scratch, cut.scratch(source, 2), generator)
        else:
            grid.round_(work, scratch)
        work.mul_(dec)
        if work is not target:
            target.copy_(work)
    return out
