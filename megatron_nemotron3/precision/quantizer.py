"""Quantization of an operand to NVFP4 or MXFP8, as values or as bytes.

fake_quantize   values: x rounded to what the format can hold, as a matmul on such hardware would use it
units           NVFP4 values without the tensor's scale: q * s_b, exact in BF16. A matmul of two such
                operands, accumulated in FP32 and multiplied once by `scales.product_scale`, is the hardware's

x is read twice, for the amax of the blocks and for rounding. On a CPU both passes process pieces in buffers
that fit the L2 cache. No step waits for the device. On CUDA torch.compile makes one kernel of each pass if
NEMOTRON3_GPU_KERNELS=1 enables kernels (`settings.gpu_kernels_enabled`): see `_form`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_nemotron3.precision import blocks as cut
from megatron_nemotron3.precision.numerics.grid import E2M1, E4M3, ValueGrid, draw
from megatron_nemotron3.precision.numerics.nvfp4 import FOUR_OVER_SIX_MAX, MAX
from megatron_nemotron3.precision.recipe import Spec
from megatron_nemotron3.precision.scales import (
    Scales,
    four_over_six_scales,
    mxfp8_scales,
    nvfp4_scales,
    nvfp4_steps,
    rotate,
)
from megatron_nemotron3.precision.settings import gpu_kernels_enabled

#: The largest magnitude to scale by: float32, [] or of a shape that broadcasts to the block grid
#: (`blocks.grid_shape`). Or a function from the amax of the blocks to this amax, for a reduction over ranks
#: or for experts that share a tensor but have a scale each.
Amax = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


class Operand(NamedTuple):
    """One operand of a matmul.

    values: in the shape of x; NVFP4 in units, q * s_b.
    amax: float32, the scale of the tensor times 2688; None in MXFP8.
    """

    values: torch.Tensor
    amax: torch.Tensor | None

    def t(self) -> Operand:
        """The transposed operand; the scale of the tensor stays."""
        return Operand(self.values.t(), self.amax)


class PreparedOperand(NamedTuple):
    """x: contiguous. block_amax: float32, on the block grid. amax: broadcasts to it; None in MXFP8.
    overwritable: x is a rotated copy that may be overwritten."""

    x: torch.Tensor
    block_amax: torch.Tensor
    amax: torch.Tensor | None
    overwritable: bool


@torch.no_grad()
def fake_quantize(
    x: torch.Tensor,
    spec: Spec,
    generator: torch.Generator | None = None,
    amax: Amax | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantize and dequantize: a new tensor of the shape of x, without gradient. Zeros are positive.

    Args:
        x: [..., m, k]; float32, bfloat16 or float16. FP16 and BF16 are converted to FP32 for the computation.
        generator: of the device of x, for stochastic rounding; None for torch's default. Elements draw in
            their order, so a seed gives the same values on any number of threads.
        amax: see `Amax`; None for that of x, after rotation. MXFP8 takes none.
        dtype: of the result; None for that of x. NVFP4 values need FP32 to be exact.
    """
    return _rounded_values(prepare(x, spec, amax), spec, generator, dtype or x.dtype, units=False)


@torch.no_grad()
def units(
    x: torch.Tensor,
    spec: Spec,
    generator: torch.Generator | None = None,
    amax: Amax | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Operand:
    """NVFP4 elements times block scales, without the scale of the tensor; arguments as `fake_quantize`.

    Magnitudes are at most 2688 and have 6 significant bits: exact in BF16, FP16 and FP32, like the product
    of two.
    """
    if spec.format != "nvfp4":
        raise ValueError(f"{spec.format} has no scale for the whole tensor: use fake_quantize")
    prepared = prepare(x, spec, amax)
    values = _rounded_values(prepared, spec, generator, dtype or x.dtype, units=True)
    assert prepared.amax is not None
    return Operand(values, prepared.amax * (MAX / FOUR_OVER_SIX_MAX if spec.four_over_six else 1.0))


def prepare(x: torch.Tensor, spec: Spec, amax: Amax | None = None) -> PreparedOperand:
    """Rotate x and find the amax of blocks and tensor. Arguments and errors as `fake_quantize`."""
    cut.check(x, spec)
    if spec.format == "mxfp8" and amax is not None:
        raise ValueError("MXFP8 has no scale for the whole tensor: leave amax out")
    x = x.contiguous()
    shape = cut.grid_shape(x, spec)
    if x.numel():
        x, flat = _block_magnitudes(x, spec)
        block_amax = flat.view(shape)
    else:
        block_amax = torch.zeros(shape, device=x.device)
    if spec.format == "mxfp8":
        return PreparedOperand(x, block_amax, None, False)
    if amax is None:
        amax = block_amax.amax() if x.numel() else block_amax.new_zeros(())
    elif not isinstance(amax, torch.Tensor):
        amax = amax(block_amax)
    return PreparedOperand(x, block_amax, amax, spec.hadamard)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Rounded as torch does: no fused multiply-add, and no type but FP32 in between.
    compiled = torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})
    limits = torch._dynamo.config
    limits.cache_size_limit = max(64, limits.cache_size_limit)  # formats, axes and types

    def run(*arguments: Any) -> Any:
        # `.data` is no view: what another tensor's shape has to do with a view's would be a form of its own.
        return compiled(*(a.data if isinstance(a, torch.Tensor) else a for a in arguments))

    return run


def _form(function: Callable[..., Any], x: torch.Tensor) -> Callable[..., Any]:
    """A pass over the elements of x, compiled on CUDA if kernels are enabled, or itself."""
    # What is compiled has only products, sums, limits and bit operations. Scales stay outside, because
    # Triton's quotients are not torch's, and so does the rotation: inductor omits its rounding to BF16, which
    # changed 1.6 % of the codes on the CPU's backend. There all else was equal to the bit, in 114 million.
    return _compiled(function) if x.is_cuda and gpu_kernels_enabled() and _exact_on(x.device) else function


@functools.cache
def _exact_on(device: torch.device) -> bool:
    """Whether a compiled pass has the bits of the plain one on a device; prints a warning if it has not."""
    # Products next to the middle of two values, where a fused multiply-add rounds to the other one.
    encode = torch.linspace(1, 2, 2**12, device=device).unsqueeze(1)
    source = torch.arange(1, 17, device=device) / 4 / encode
    plain, compiled = torch.empty_like(source), torch.empty_like(source)
    _round(E2M1, source, plain, encode, encode, None)
    try:
        _compiled(_round)(E2M1, source, compiled, encode, encode, None)
        found = _compiled(_magnitudes)(source.bfloat16(), 1)
        same = torch.equal(plain, compiled) and torch.equal(_magnitudes(source.bfloat16(), 1), found)
        problem = "" if same else "it rounds otherwise than torch"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever a compiler may raise
        problem = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if problem:
        print(f"megatron_nemotron3: warning: quantizers run without torch.compile on {device}: {problem}")
    return not problem


def _block_magnitudes(x: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in its dtype, rotated if `spec` says so; amax of the blocks, float32, the block grid flattened)."""
    blocks = cut.view(x, spec)
    rotated = torch.empty_like(x) if spec.hadamard else x
    found = []
    for source, target in cut.pieces(blocks, cut.view(rotated, spec)):
        if spec.hadamard:
            # Rounded to the dtype of x: the hardware rotates into BF16 and takes the amax of that.
            source = target.copy_(rotate(source.float(), cut.scratch(source, 0)))
        found.append(_form(_magnitudes, x)(source, spec.block if spec.tile else 1))
    return rotated, found[0] if len(found) == 1 else torch.cat(found)


def _magnitudes(source: torch.Tensor, tile: int) -> torch.Tensor:
    """Amax of the blocks of a piece; of `tile` neighboring columns together."""
    work = cut.scratch(source, 0)
    if source.dtype == torch.float32:
        torch.abs(source, out=work)
    else:
        work.copy_(source).abs_()
    largest = cut.largest(work)
    return largest.unflatten(1, (-1, tile)).amax(2) if tile > 1 else largest


def _rounded_values(
    prepared: PreparedOperand,
    spec: Spec,
    generator: torch.Generator | None,
    dtype: torch.dtype,
    *,
    units: bool,
) -> torch.Tensor:
    """The rounded x in `dtype`; `units` leaves out the scale of the tensor."""
    x, amax = prepared.x, prepared.amax
    # torch.compile refuses an argument that shares its memory with one that is written.
    in_place = prepared.overwritable and x.dtype == dtype and _form(_round, x) is _round
    out = x if in_place else torch.empty_like(x, dtype=dtype)
    if not x.numel():
        return out
    if amax is None:
        encode, decode = mxfp8_scales(prepared.block_amax)
    else:
        encode, decode = _block_scales(x, spec, prepared.block_amax, amax)
        if not units:
            decode = nvfp4_steps(decode, amax, FOUR_OVER_SIX_MAX if spec.four_over_six else MAX)
    return _round_blocks(x, spec, encode, decode, out, generator)


def _block_scales(x: torch.Tensor, spec: Spec, block_amax: torch.Tensor, amax: torch.Tensor) -> Scales:
    """Scales of the blocks of x; in four-over-six of each block those with the smaller error, 6 if equal."""
    if not spec.four_over_six or not x.numel():
        return nvfp4_scales(block_amax, amax)
    six, four = four_over_six_scales(block_amax, amax)
    error_6, error_4 = (_block_errors(x, spec, scales, amax) for scales in (six, four))
    better = (error_4 < error_6).view(block_amax.shape)
    return Scales(*(torch.where(better, b, a) for a, b in zip(six, four, strict=True)))


def _block_errors(x: torch.Tensor, spec: Spec, scales: Scales, amax: torch.Tensor) -> torch.Tensor:
    """Sum of abs(x' - x) of each block, float32, the block grid flattened."""
    blocks = cut.view(x, spec)
    whole = amax.expand(scales.block.shape)
    views = (cut.expand(t, blocks, spec) for t in (scales.encode, scales.block, whole))
    found = []
    for source, encode, block, tensor in cut.pieces(blocks, *views):
        values = source.float()
        error = E2M1.round_(values * encode, torch.empty_like(values))
        error.mul_(block).mul_(tensor).div_(torch.full_like(error, FOUR_OVER_SIX_MAX))
        error.sub_(values).abs_()
        # [n, 16], [g, 16, k] or, of tiles, [g, 16, k / 16, 16]: along the row first.
        terms = error.unflatten(2, (-1, spec.block)).unbind(3) if spec.tile else error.unbind(1)
        total = torch.zeros_like(terms[0])
        for term in terms:
            total += term
        while spec.tile and total.shape[1] > 1:
            upper, lower = total.chunk(2, 1)
            total = upper + lower
        found.append(total.flatten())
    return torch.cat(found)


def _round_blocks(
    x: torch.Tensor,
    spec: Spec,
    encode: torch.Tensor,
    decode: torch.Tensor,
    out: torch.Tensor,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """out = grid(x * encode) * decode, both on the block grid."""
    grid = E2M1 if spec.format == "nvfp4" else E4M3
    blocks = cut.view(x, spec)
    views = (cut.view(out, spec), cut.expand(encode, blocks, spec), cut.expand(decode, blocks, spec))
    for source, target, enc, dec in cut.pieces(blocks, *views):
        bits = None
        if spec.stochastic:
            bits = draw(cut.scratch(source.view(-1)[: source.numel() // 2], 1), generator)
        _form(_round, x)(grid, source, target, enc, dec, bits)
    return out


def _round(
    grid: ValueGrid,
    source: torch.Tensor,
    target: torch.Tensor,
    encode: torch.Tensor,
    decode: torch.Tensor,
    bits: torch.Tensor | None,
) -> None:
    """target = grid(source * encode) * decode, of a piece; with `bits` rounded stochastically."""
    # An FP32 result serves as its own buffer, which saves one in the cache.
    work = target if target.dtype == torch.float32 else cut.scratch(source, 0)
    if source.dtype == torch.float32:
        torch.mul(source, encode, out=work)
    else:
        work.copy_(source).mul_(encode)
    if bits is None:
        grid.round_(work, cut.scratch(source, 1))
    else:
        grid.round_stochastic_(work, cut.scratch(source, 1), cut.scratch(source, 2), bits)
    work.mul_(decode)
    if work is not target:
        target.copy_(work)
