"""How one operand of a matrix product is quantized, and the six operands of a linear layer. No torch.

    fprop   Y  = X W^T       dgrad   dX = dY W       wgrad   dW = dY^T X

In each product both operands are cut into blocks along the axis that is summed over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Elements that share a scale.
BLOCK = {"nvfp4": 16, "mxfp8": 32}


@dataclass(frozen=True)
class Spec:
    """One operand.

    format: "nvfp4" (E2M1 elements, an E4M3 scale for 16 of them, an FP32 scale for the tensor) or "mxfp8"
        (E4M3 elements, a power of two for 32 of them).
    axis: the axis that is summed over and holds the blocks: -1, or -2 for both operands of wgrad.
    tile: one scale for 16 x 16 elements instead of 1 x 16 (weights). The values are then the same for both
        axes.
    hadamard: rotate every block by the random Hadamard transform first; the values stay rotated.
    stochastic: round stochastically instead of to nearest.

    Raises:
        ValueError: no such format or axis, or a combination that TransformerEngine does not have.
    """

    format: str = "nvfp4"
    axis: int = -1
    tile: bool = False
    hadamard: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.format not in BLOCK:
            raise ValueError(f"format {self.format!r} is unknown: use one of {', '.join(BLOCK)}")
        if self.axis not in (-1, -2):
            raise ValueError(f"blocks along axis {self.axis} are not supported: use -1 or -2")
        extras = [name for name in ("tile", "hadamard", "stochastic") if getattr(self, name)]
        if self.format == "mxfp8" and extras:
            raise ValueError(f"MXFP8 has no {' or '.join(extras)}: these belong to NVFP4")
        if self.tile and self.hadamard:
            raise ValueError(
                "a 16 x 16 tile cannot be rotated along one axis: use tile or hadamard, not both"
            )

    @property
    def block(self) -> int:
        """Elements along `axis` that share a scale."""
        return BLOCK[self.format]


@dataclass(frozen=True)
class Operands:
    """The operands of the three products; None leaves one as it is. The weight of dgrad is that of fprop."""

    x: Spec | None
    weight: Spec | None
    dgrad_dy: Spec | None
    wgrad_dy: Spec | None
    wgrad_x: Spec | None


_ROW, _COLUMN = Spec(), Spec(axis=-2)

#: The recipe of "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 4.
NVFP4 = Operands(
    x=_ROW,
    weight=replace(_ROW, tile=True),
    dgrad_dy=replace(_ROW, stochastic=True),
    wgrad_dy=replace(_COLUMN, hadamard=True, stochastic=True),
    wgrad_x=replace(_COLUMN, hadamard=True),
)
