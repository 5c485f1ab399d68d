"""Rounding as noise: how far two correct systems of a type lie apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

#: Relative rounding error of a number of each type. Types below BF16 are treated as it.
ROUNDING = {"float64": 2.0**-24, "float32": 2.0**-24, "float16": 2.0**-11}
BF16_ROUNDING = 2.0**-9
#: Standard deviation of a layer's output in roundings of one number, its products, norm and activation: in
#: FP32, and in types of fewer bits.
INSIDE = 6.0, 3.0
#: Runs with noise. In FP32 routers rarely have near ties: the first run decides each the other way.
DRAWS = 6


def rounding(dtype: str) -> float:
    """Relative rounding error of a system's numbers."""
    return ROUNDING.get(dtype, BF16_ROUNDING)


class Noise:
    """Random rounding in one sequence: of layers, of the stream after them, of routers' scores, of logits.

    Args:
        unit: relative rounding error of a number.
        draw: number of the run with noise.
        sequence: number of the sequence.
    """

    def __init__(self, unit: float, draw: int, sequence: int) -> None:
        self.unit = unit
        self.inside = INSIDE[unit > 1e-6] * unit
        self.generator = torch.Generator().manual_seed(draw and 1000 * draw + sequence)
        self._flips_ties = draw == 0 and unit < 1e-6
        #: Rows at the end that are no tokens; the noise of the others does not depend on them.
        self.padding = 0

    def _random(self, like: Tensor, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
        numbers = draw(len(like) - self.padding, *like.shape[1:], generator=self.generator)
        return F.pad(numbers, (0, 0, 0, self.padding))

    def experts(self, ranked: Tensor, topk: int) -> Tensor:
        """What a router selects by [s, experts]: [s, topk]."""
        if not self._flips_ties:
            ranked = ranked + self.unit * self._random(ranked)
        elif ranked.shape[-1] > topk:
            # Scores are below 1; those of two correct systems differ by a few roundings.
            best = ranked.topk(topk + 1, dim=-1)
            tie = best.values[:, -2] - best.values[:, -1] < 8 * self.inside
            last, rejected = best.indices[:, -2:-1], best.indices[:, -1:]
            other = ranked.scatter(-1, rejected, ranked.gather(-1, last) + 1e-3)
            ranked = torch.where(tie[:, None], other, ranked)
        return ranked.topk(topk, dim=-1).indices

    def stream(self, x: Tensor, update: Tensor) -> Tensor:
        """The residual stream after a layer [s, d], from that before it and the layer's update."""
        size = update.square().mean(-1, keepdim=True).sqrt()
        stream = x + update + self.inside * size * self._random(update)
        return stream * (1 + self.unit * (2 * self._random(stream, torch.rand) - 1))

    def logits(self, band: Tensor) -> Tensor:
        return band * (1 + self.unit * self._random(band))
