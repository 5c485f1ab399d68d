"""How operands of a linear layer's three matmuls are quantized, by format and switches.

fprop   Y  = Q(X) Q(W)^T       dgrad   dX = Q(dY) Q(W)       wgrad   dW = Q(dY)^T Q(X)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from megatron_nemotron3.precision.formats import BF16, EMULATED, MXFP8, NVFP4
from megatron_nemotron3.precision.numerics import MXFP8_BLOCK, NVFP4_BLOCK
from megatron_nemotron3.precision.settings import Emulation

#: Elements that share a scale.
BLOCK = {NVFP4: NVFP4_BLOCK, MXFP8: MXFP8_BLOCK}


@dataclass(frozen=True)
class Spec:
    """How one operand is quantized.

    Args:
        format: "nvfp4" or "mxfp8".
        axis: the contracted axis, along which blocks lie: -1, or -2 for both operands of wgrad.
        tile: one scale for 16 x 16 elements (weights). Values are then the same for both axes.
        hadamard: rotate every block by the random Hadamard transform first; the values stay rotated.
        stochastic: round stochastically instead of to nearest.
        four_over_six: scale each block so that its largest magnitude becomes 6 or 4, whichever is closer.
    """

    format: str = NVFP4
    axis: int = -1
    tile: bool = False
    hadamard: bool = False
    stochastic: bool = False
    four_over_six: bool = False

    def __post_init__(self) -> None:
        if self.format not in BLOCK:
            raise ValueError(f"format {self.format!r} is unknown: use one of {', '.join(BLOCK)}")
        if self.axis not in (-1, -2):
            raise ValueError(f"blocks along axis {self.axis} are not supported: use -1 or -2")
        extras = [name for name in ("tile", "hadamard", "stochastic", "four_over_six") if getattr(self, name)]
        if self.format == MXFP8 and extras:
            raise ValueError(f"MXFP8 has no {' or '.join(extras)}: these belong to NVFP4")
        if self.tile and self.hadamard:
            raise ValueError(
                "a 16 x 16 tile cannot be rotated along one axis: use tile or hadamard, not both"
            )
        if self.four_over_six and (self.hadamard or self.stochastic):
            raise ValueError("four-over-six goes with rounding to nearest, without rotation, as in TE")

    @property
    def block(self) -> int:
        return BLOCK[self.format]


@dataclass(frozen=True)
class MatmulRecipe:
    """The two operands of each matmul, x or the gradient first; None for a matmul that is not quantized."""

    fprop: tuple[Spec, Spec] | None  # x, weight
    dgrad: tuple[Spec, Spec] | None  # dy, weight
    wgrad: tuple[Spec, Spec] | None  # dy, x

    @property
    def shares_weight(self) -> bool:
        """Whether dgrad uses the same quantized weight as fprop."""
        return bool(self.fprop and self.dgrad and self.fprop[1] == self.dgrad[1])

    @property
    def token_block(self) -> int:
        """wgrad's operands are padded to a multiple of this number of rows; 1 if wgrad is not quantized."""
        return self.wgrad[0].block if self.wgrad else 1


@functools.lru_cache
def recipe(fmt: str, chosen: Emulation) -> MatmulRecipe | None:
    """The recipe of an emulated format or of "bf16"; None if nothing is quantized.

    NVFP4's is that of "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 4. MXFP8 has
    no rotation, stochastic rounding or tiles, and its dgrad quantizes the weight anew, along the other axis.
    """
    if fmt == BF16:
        return None
    if fmt == NVFP4:
        weight = Spec(tile=chosen.tile, four_over_six=chosen.four_over_six)
        dgrad_weight = weight if chosen.tile else replace(weight, axis=-2)
        dgrad_dy = Spec(stochastic=chosen.stochastic)
        wgrad_x = Spec(axis=-2, hadamard=chosen.hadamard)
        wgrad_dy = replace(wgrad_x, stochastic=chosen.stochastic)
        result = MatmulRecipe((Spec(), weight), (dgrad_dy, dgrad_weight), (wgrad_dy, wgrad_x))
    elif fmt == MXFP8:
        row, column = Spec(MXFP8), Spec(MXFP8, axis=-2)
        result = MatmulRecipe((row, row), (row, column), (column, column))
    else:
        raise ValueError(f"format {fmt!r} is not emulated: use {', '.join(EMULATED)} or {BF16}")
    off = {name: None for name in ("fprop", "dgrad", "wgrad") if not getattr(chosen, name)}
    return replace(result, **off)
