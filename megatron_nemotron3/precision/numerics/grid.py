"""Round FP32 tensors to the values of a small floating-point format, in place and in few passes.

Let p be the power of two at or below |x|, clamped to the format's normal range; values around x are p /
2^mantissa apart. Adding 1.5 * 2^23 spacings pushes all finer bits out of an FP32 mantissa, which rounds to
nearest, ties to the even multiple; subtracting them leaves the rounded value. Stochastic rounding first adds
a random fraction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EXPONENT = 0x7F800000
#: Sets the lowest bit of each of the four 16-bit integers in a 64-bit one.
_ODD = 0x0001_0001_0001_0001


@dataclass(frozen=True)
class ValueGrid:
    """The values of a format."""

    #: Explicit mantissa bits.
    mantissa: int
    #: The smallest normal value; below it the spacing stays the same.
    smallest: float
    #: The power of two at or below `max`, the largest value, to which larger magnitudes are clamped.
    largest: float
    max: float

    def _powers(self, x: torch.Tensor, scratch: torch.Tensor) -> None:
        torch.bitwise_and(x.view(torch.int32), _EXPONENT, out=scratch.view(torch.int32))
        scratch.clamp_(self.smallest, self.largest)

    def _nearest(self, x: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
        # `alpha * power` is exact, so a fused and an unfused multiply-add give the same bits.
        push = 1.5 * 2.0 ** (23 - self.mantissa)
        return x.add_(powers, alpha=push).sub_(powers, alpha=push).clamp_(-self.max, self.max)

    def round_(self, x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Replace x by the nearest values, ties to the even mantissa; NaN stays NaN, -0.0 becomes 0."""
        self._powers(x, scratch)
        return self._nearest(x, scratch)

    def round_stochastic_(
        self, x: torch.Tensor, scratch: torch.Tensor, noise: torch.Tensor, bits: torch.Tensor
    ) -> torch.Tensor:
        """Replace x by one of its two neighbors, the upper one with probability (x - lower) / spacing.

        The expected value is x wherever |x| <= max. Probabilities have 15 bits. Values of the format stay.
        `bits`: of `draw`; they may lie in `scratch`.
        """
        noise.view(-1).copy_(bits.view(torch.int16))
        self._powers(x, scratch)
        x.addcmul_(scratch, noise, value=2.0 ** -(16 + self.mantissa))
        return self._nearest(x, scratch)


def draw(memory: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random bits in `memory`, which is FP32 and has half as many elements as there are to be rounded."""
    # One 64-bit draw serves four elements, because the generator is the expensive part on a CPU.
    bits = memory.view(torch.int64)
    # Odd numbers are never exactly half a spacing, which would move values that need no rounding.
    return bits.random_(-(2**63), None, generator=generator).bitwise_or_(_ODD)


#: The 4-bit element of NVFP4, `e2m1.MAGNITUDES`.
E2M1 = ValueGrid(mantissa=1, smallest=1.0, largest=4.0, max=6.0)
#: The 8-bit element of MXFP8.
E4M3 = ValueGrid(mantissa=3, smallest=2.0**-6, largest=256.0, max=448.0)
