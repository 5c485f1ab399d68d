"""What the layer kinds share: the norm in front, and how a layer gets its tensors.

Activations are [tokens, d], all rows' tokens one behind the other, in the dtype of the weights. A layer
returns the residual stream behind it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_nemotron3.generate.scan import MambaTape
from megatron_nemotron3.generate.span import Span
from megatron_nemotron3.generate.state import LayerState
from megatron_nemotron3.models import Nemotron3Config


class Read(Protocol):
    """Gives a tensor by its Hugging Face name below the layer."""

    def __call__(self, name: str, *shape: int, float32: bool = False) -> Tensor: ...


class Layer(Protocol):
    """A layer of a stack."""

    def new_state(self, batch: int, capacity: int) -> LayerState:
        """What it keeps of `batch` sequences, empty."""
        ...

    def __call__(self, x: Tensor, state: LayerState, span: Span) -> tuple[Tensor, MambaTape | None]:
        """x [tokens, d] -> the stream behind the layer, and with `span.keep` how to go back."""
        ...


class Norm:
    """RMSNorm over groups of channels, in few operations: statistics FP32, result in the dtype of x.

    x / sqrt(mean(x^2) + eps) = x / sqrt(|x|^2 + n eps) * sqrt(n), which is one norm, one hypot, one division.

    Args:
        weight: [d].
        groups: of channels with a norm each.
    """

    def __init__(self, weight: Tensor, eps: float, groups: int = 1) -> None:
        n = len(weight) // groups
        self.dtype, self.groups = weight.dtype, groups
        self.weight = weight.float() * n**0.5
        self.eps = torch.tensor((n * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float() if self.groups == 1 else x.float().view(len(x), self.groups, -1)
        length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(self.eps)
        y = torch.div(wide, length)
        y = y if self.groups == 1 else y.view(x.shape)
        return y.mul_(self.weight).to(self.dtype)


def transposed(weight: Tensor) -> Tensor:
    """[rows, columns] -> [columns, rows] in memory: one token times it is twice as quick on a CPU."""
    return weight.t().contiguous()


def norm(read: Read, config: Nemotron3Config, name: str = "norm.weight") -> Norm:
    """The norm of that name."""
    return Norm(read(name, config.hidden_size), config.layernorm_epsilon)
