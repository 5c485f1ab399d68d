"""What Megatron logs of a micro-batch: losses of tokens, as [weighted sum, divisor]."""

from __future__ import annotations

from typing import Any

import torch

from megatron_nemotron3.common.hooks import unwrapped


def reported(
    model: Any, output: torch.Tensor, weights: torch.Tensor, divisor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The cross-entropy of a micro-batch, and each teacher's divergence, numbered if there are several."""
    hooks = getattr(unwrapped(model), "distillation", None)
    entropy, *apart = hooks.parts if hooks is not None and hooks.parts else [output]

    def total(tokens: torch.Tensor) -> torch.Tensor:
        loss = (tokens.detach().reshape(-1).float() * weights.reshape(-1).float()).sum()
        return torch.stack([loss, divisor.to(loss.dtype)])

    names = ["divergence"] if len(apart) == 1 else [f"divergence {i}" for i in range(1, len(apart) + 1)]
    return {"lm loss": total(entropy), **{name: total(one) for name, one in zip(names, apart)}}
