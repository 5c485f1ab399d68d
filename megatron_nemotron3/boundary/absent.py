"""The output of an encoder that had no input: no rows, but a place in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def absent(hidden: int, dtype: torch.dtype, parameters: Sequence[Tensor]) -> Tensor:
    """Rows [0, hidden] whose backward gives every parameter that is trained a gradient of zeros.

    So a rank without input runs the hooks of data parallelism as its siblings do.
    """
    if not parameters:
        return torch.empty(0, hidden, dtype=dtype, device=torch.get_default_device(), requires_grad=True)
    out: Tensor = _Absent.apply(hidden, dtype, *parameters)
    return out


class _Absent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: int, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return torch.empty(0, hidden, dtype=dtype, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                torch.zeros((), dtype=dtype, device=device).expand(shape) if need else None
                for (shape, dtype, device), need in zip(ctx.like, needed, strict=True)
            ),
        )
