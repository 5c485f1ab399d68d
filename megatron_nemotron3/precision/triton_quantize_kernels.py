"""Triton kernels of fake quantization. `triton_quantize` launches them and explains them.

Every value goes through the operations of `quantizer` in their order, each rounded to FP32. So kernels are
launched without the contraction of products and sums (`enable_fp_fusion=False`), quotients are `div_rn`, and
limits keep NaN. `fma` stands where the product is exact, and in the rotation, as in torch's product.

    rows      blocks [blocks, BLOCK] along the last axis. A program takes ROWS of them, TILES times.
    columns   blocks along the axis before it: groups [groups, BLOCK, columns]. A program takes COLUMNS of a
              group, row by row. TILE neighboring columns share a scale (TILE is 1 or BLOCK).

A block's number is its place in the flat block grid. Offsets of elements are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_nemotron3.precision.numerics import e2m1, e4m3
from megatron_nemotron3.precision.numerics.grid import E2M1, E4M3, ValueGrid
from megatron_nemotron3.precision.scales import MAX, hadamard_matrix

#: Elements whose random parts come from one draw of Philox, 128 bits.
PARTS: tl.constexpr = tl.constexpr(8)

_FLT_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_WHOLE: tl.constexpr = tl.constexpr(MAX)
_PER_WHOLE: tl.constexpr = tl.constexpr(1 / MAX)
_PER_E2M1: tl.constexpr = tl.constexpr(1 / e2m1.MAX)
_PER_E4M3: tl.constexpr = tl.constexpr(1 / e4m3.MAX)


def _limits(grid: ValueGrid) -> tl.constexpr:
    return tl.constexpr((grid.mantissa, grid.smallest, grid.largest, grid.max))


_E2M1: tl.constexpr = _limits(E2M1)
_E4M3: tl.constexpr = _limits(E4M3)
#: `scales.hadamard_matrix`, row by row.
_H: tl.constexpr = tl.constexpr(tuple(hadamard_matrix(torch.device("cpu")).flatten().tolist()))


# Numbers


@triton.jit
def _bits(value):  # type: ignore[no-untyped-def]
    """Bits of the magnitude as int32, which has the order of the values, NaN last."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(x, noise, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """`ValueGrid.round_`; with noise, parts of a power of two, `ValueGrid.round_stochastic_`."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.minimum(tl.maximum(power, GRID[1]), GRID[2])  # never NaN
    if noise is not None:
        x = tl.fma(power, noise, x)
    push = tl.zeros_like(power) + 1.5 * 2.0 ** (23 - GRID[0])
    x = tl.fma(power, -push, tl.fma(power, push, x))
    return tl.clamp(x, -GRID[3], GRID[3], propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _noise(a, b, c, d, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """n / 2^17, as E2M1 needs it; n: half of one of four words, part 0 to 7, odd and with a sign."""
    if part < 2:
        word = a
    elif part < 4:
        word = b
    elif part < 6:
        word = c
    else:
        word = d
    if part % 2 == 1:
        word = word >> 16
    # The last bits of a number between 64 and 64.5: n + 2^15. Conversion is slow on a GPU.
    word = (word & 0xFFFE) ^ 0x42808001
    return word.to(tl.float32, bitcast=True) - 64.25


@triton.jit
def _wholes(amax):  # type: ignore[no-untyped-def]
    """S / 6 and 1 / S of `nvfp4_scales`."""
    whole = tl.div_rn(tl.zeros_like(amax) + _WHOLE, amax)
    whole = tl.where(whole > _FLT_MAX, _FLT_MAX, whole)
    whole = tl.where(whole == 0, 1.0, whole)
    return whole * _PER_E2M1, tl.div_rn(tl.zeros_like(whole) + 1.0, whole)


@triton.jit
def _nvfp4(largest, amax, sixth, inverse, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(encode, decode) of blocks: `nvfp4_scales`, and with the scale of the tensor `nvfp4_steps`."""
    block = _round(largest * sixth, None, _E4M3)
    step = block * inverse
    encode = tl.div_rn(tl.zeros_like(step) + 1.0, step)
    encode = tl.where(encode > _FLT_MAX, _FLT_MAX, encode)
    if UNITS:
        return encode, block
    else:
        return encode, block * amax * _PER_WHOLE


@triton.jit
def _mxfp8(largest):  # type: ignore[no-untyped-def]
    """(encode, decode) of blocks: `mxfp8_scales`; where encode is NaN, decode is not used."""
    bits = (largest * _PER_E4M3).to(tl.int32, bitcast=True)
    biased = (bits + 0x7FFFFF) >> 23
    biased = tl.where(bits <= 0x400000, 0, biased)
    encode = tl.where(biased == 0, 0, (254 - biased) << 23).to(tl.float32, bitcast=True)
    return encode + (largest - largest), (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(value, encode, decode, noise, NVFP4: tl.constexpr):  # type: ignore[no-untyped-def]
    """grid(value * encode) * decode"""
    scaled = value.to(tl.float32) * encode
    if NVFP4:
        return _round(scaled, noise, _E2M1) * decode
    else:
        return _round(scaled, None, _E4M3) * decode


# Largest magnitudes


@triton.jit
def magnitudes_of_rows(x, largest, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Amax of blocks [blocks, BLOCK] -> [blocks]."""
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    bits = _bits(tl.load(x + at, mask=(block < blocks)[:, None], other=0.0))
    tl.store(largest + block, tl.max(bits, 1).to(tl.float32, bitcast=True), mask=block < blocks)


@triton.jit
def magnitudes_of_columns(  # type: ignore[no-untyped-def]
    x, largest, columns, chunks, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Amax of blocks [groups, BLOCK, columns] -> [groups, columns / TILE]."""
    group, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    first = group * BLOCK * columns + column
    bits = tl.zeros((COLUMNS,), tl.int32)
    for k in tl.static_range(BLOCK):
        value = tl.load(x + first + k * columns, mask=column < columns, other=0.0)
        bits = tl.maximum(bits, _bits(value))
    if TILE > 1:
        bits = tl.max(tl.reshape(bits, (COLUMNS // TILE, TILE)), 1)
    width = columns // TILE
    block = chunk * (COLUMNS // TILE) + tl.arange(0, COLUMNS // TILE)
    tl.store(largest + group * width + block, bits.to(tl.float32, bitcast=True), mask=block < width)


@triton.jit
def rotate(  # type: ignore[no-untyped-def]
    x, rotated, largest, columns, chunks, along, across, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks of columns; or rows, as the columns of one group. Neighbors of a block are `along` apart,
    neighboring blocks `across`."""
    group, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    first = group * BLOCK * columns + column.to(tl.int64) * across
    values = ()
    for k in tl.static_range(BLOCK):
        value = tl.load(x + first + k * along, mask=inside, other=0.0).to(tl.float32)
        values = values + (value,)  # type: ignore[assignment]
    bits = tl.zeros((COLUMNS,), tl.int32)
    for i in tl.static_range(BLOCK):
        turned = tl.zeros((COLUMNS,), tl.float32)
        for k in tl.static_range(BLOCK):
            turned = tl.fma(values[k], tl.full((COLUMNS,), _H[k * BLOCK + i], tl.float32), turned)
        # The maximum is of what is written.
        written = turned.to(rotated.dtype.element_ty)
        tl.store(rotated + first + i * along, written, mask=inside)
        bits = tl.maximum(bits, _bits(written))
    tl.store(largest + group * columns + column, bits.to(tl.float32, bitcast=True), mask=inside)


# Rounding. MXFP8: largest and amax are None, the magnitudes are found here. seed: the key of Philox. bits:
# int16, n of `_noise` for each element, instead. Neither: to nearest.


@triton.jit
def finish_rows(  # type: ignore[no-untyped-def]
    x, out, largest, amax, seed, bits, blocks, per,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """EACH: the amax of block b is entry b // per; otherwise all have the first."""
    i = tl.arange(0, BLOCK)[None, :]
    if seed is not None:
        here = tl.arange(0, ROWS)[:, None] * BLOCK + i
        a, b, c, d = tl.randint4x(tl.load(seed), tl.program_id(0).to(tl.int64) * (ROWS * BLOCK) + here)
    if NVFP4 and not EACH:
        whole = tl.load(amax)
        sixth, inverse = _wholes(whole)
    for part in tl.static_range(PARTS):
        block = (tl.program_id(0) * PARTS + part) * ROWS + tl.arange(0, ROWS)
        inside = block < blocks
        at = block.to(tl.int64)[:, None] * BLOCK + i
        value = tl.load(x + at, mask=inside[:, None], other=0.0)
        if NVFP4:
            found = tl.load(largest + block, mask=inside, other=0.0)
            if EACH:
                whole = tl.load(amax + block // per, mask=inside, other=1.0)
                sixth, inverse = _wholes(whole)
            encode, decode = _nvfp4(found, whole, sixth, inverse, UNITS)
        else:
            encode, decode = _mxfp8(tl.max(_bits(value), 1).to(tl.float32, bitcast=True))
        noise = None
        if seed is not None:
            noise = _noise(a, b, c, d, part)
        elif bits is not None:
            noise = tl.load(bits + at, mask=inside[:, None], other=1).to(tl.float32) * 2.0**-17
        value = _quantize(value, encode[:, None], decode[:, None], noise, NVFP4)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def finish_columns(  # type: ignore[no-untyped-def]
    x, out, largest, amax, seed, bits, columns, chunks, per,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr,
    UNITS: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """The amax of block b is entry b // per; not EACH: the same for the blocks of a group."""
    group, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    first = group * BLOCK * columns + column
    if NVFP4:
        start = group * (columns // TILE)
        block = start + column // TILE
        found = tl.load(largest + block, mask=inside, other=0.0)
        whole = tl.load(amax + block // per, mask=inside, other=1.0) if EACH else tl.load(amax + start // per)
        sixth, inverse = _wholes(whole)
        encode, decode = _nvfp4(found, whole, sixth, inverse, UNITS)
    else:
        magnitude = tl.zeros((COLUMNS,), tl.int32)
        for k in tl.static_range(BLOCK):
            magnitude = tl.maximum(magnitude, _bits(tl.load(x + first + k * columns, mask=inside, other=0.0)))
        encode, decode = _mxfp8(magnitude.to(tl.float32, bitcast=True))
    for draw in tl.static_range(BLOCK // PARTS):
        if seed is not None:
            a, b, c, d = tl.randint4x(tl.load(seed), (group * columns + column) * (BLOCK // PARTS) + draw)
        for part in tl.static_range(PARTS):
            at = first + (draw * PARTS + part) * columns
            value = tl.load(x + at, mask=inside, other=0.0)
            noise = None
            if seed is not None:
                noise = _noise(a, b, c, d, part)
            elif bits is not None:
                noise = tl.load(bits + at, mask=inside, other=1).to(tl.float32) * 2.0**-17
            value = _quantize(value, encode, decode, noise, NVFP4)
            tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
