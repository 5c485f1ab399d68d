"""Linears that compute with the weights that `convert to-hf --quantize` packs (quantization-aware training).

Each product takes the weight that an inference engine reads from the packed checkpoint, to the bit, rounded
once to BF16. The gradient goes to the weight itself (straight-through estimator). All else is as in a plain
run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.numerics import nvfp4


class PackedProducts:
    """`products` of a linear whose weights are packed (`layers.linear.ReplaceableProducts`)."""

    #: In training and evaluation.
    formats = (NVFP4, NVFP4)

    def __init__(self, search: str = "") -> None:
        self.search = search

    def recipe(self, module: Any) -> str:
        """The same in training and evaluation."""
        return NVFP4

    def linear(self, module: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [s, b, in] -> [s, b, out]; arguments are those of Megatron's own function."""
        (values,) = _StraightThrough.apply(module.tp_group, self.search, weight)
        y: Tensor = module.plain_product(x, values, *args, **kwargs)
        return y

    def takes_device_counts(self, module: Any) -> bool:
        """As a plain linear of experts."""
        return True

    def grouped(self, module: Any, x: Tensor, weights: list[Tensor], counts: list[int] | Tensor) -> Tensor:
        """x [t, in], rows sorted by expert -> [t, out]."""
        values = _StraightThrough.apply(module.tp_group, self.search, *weights)
        y: Tensor = module.products_of(x, list(values), counts)
        return y


def packed_values(weights: Tensor, group: Any, search: str = "") -> Tensor:
    """The values of E packed weights [E, out, in], in their dtype."""
    largest = weights.abs().flatten(1).amax(1).float()
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    largest = largest.view(-1, 1, 1)
    scale = nvfp4.scale_of(largest, nvfp4.LARGEST[search])
    return nvfp4.dequantize(*nvfp4.quantize(weights, largest, search), scale).to(weights.dtype)


class _StraightThrough(torch.autograd.Function):
    """(group, search for scales, weights) -> their packed values; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, group: Any, search: str, *weights: Tensor) -> tuple[Tensor, ...]:
        return packed_values(torch.stack([w.detach() for w in weights]), group, search).unbind(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *gradients
