"""The frozen model under the MTP heads: it has no gradient, and its hidden states may come from a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def freeze(model: Any) -> None:
    """Leave only the MTP block trainable. Call it before DDP wraps the model.

    The correction of the decoder's routers (`expert_bias`), which is no parameter, stays as it is, too: it
    moves by what the routers count, and without gradients they count nothing.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    if model.mtp_process:
        for parameter in model.mtp.parameters():
            parameter.requires_grad = True
    for module in model.decoder.modules():
        if isinstance(module, TopKRouter):
            module.frozen_expert_bias = True


class _ZeroGradient(torch.autograd.Function):
    """Pass a tensor on, and give another one, which it was not computed from, a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, output: Tensor) -> Tensor:
        ctx.like = received.shape, received.dtype, received.device
        # Megatron frees the memory of what a stage sends, and refuses to free that of a view.
        result = torch.empty(1, dtype=output.dtype, device=output.device)
        result.data = output.data
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), gradient


@dataclass
class Trunk:
    """What runs the layers of a frozen stack (`Nemotron3Stack.around`).

    Attributes:
        cache: number of micro-batches to keep.
        last: whether this is the last stage, whose output is what MTP reads; others keep only its shape.
        kept: outputs [s, b, d] of the first micro-batches.
        batch: the one of this training forward, from 0; None in evaluation.
    """

    stack: Any
    cache: int
    last: bool
    kept: list[Tensor] = field(default_factory=list)
    batch: int | None = None
    device: torch.device | None = None
    _forwards: int = 0

    def __call__(self, run: Callable[[], Tensor]) -> Tensor:
        """Return this stage's output; its layers have no gradient."""
        with torch.no_grad():
            output = self._output(run)
        return output if self.last else self.linked(output)

    def linked(self, output: Tensor) -> Tensor:
        """Return what this stage ends in, so that the stage before is sent a gradient: zeros."""
        received = None if self.stack.pre_process else self.stack.input_tensor
        if received is None or not received.requires_grad:
            return output
        linked: Tensor = _ZeroGradient.apply(received, output)
        return linked

    def begin(self, training: bool) -> int | None:
        """Count a forward pass of the model; return the micro-batch whose inputs and output are kept."""
        self.batch = None
        if training and self.cache:
            self.batch = self._forwards % self.cache
            self._forwards += 1
        return self.batch

    def _output(self, run: Callable[[], Tensor]) -> Tensor:
        if self.batch is None or self.batch == len(self.kept):
            output = run()
            if self.batch is not None:
                self.kept.append(output if self.last else output.to("meta"))
                self.device = output.device
            return output
        kept = self.kept[self.batch]
        # The last stage has kept its own, and does not look at what another one sends.
        return kept if self.last else torch.zeros_like(kept, device=self.device)
