"""What one layer collects during a step, by forward hooks. Nothing here changes a tensor.

Hooks act on the first forward of a micro-batch. They ignore the forward that activation recomputation repeats
inside the backward pass, and evaluation, where modules are not in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from megatron_nemotron3.common.hooks import MeasuredSteps, first_forward, no_wrapper

#: Maximum number of visits kept without a report, for training loops that never request one.
LIMIT = 16_384


@dataclass(eq=False)
class WatchedLayer:
    """One layer of the stack: its names, and what its hooks collected since the last report.

    `rows` has one name per visit of a micro-batch: one for a decoder layer, and one per depth, in order, for
    an MTP layer that is repeated. `name` is for numbers of the layer's weights, which all visits share.
    """

    name: str
    rows: tuple[str, ...]
    module: torch.nn.Module
    #: Shared by all layers.
    switch: MeasuredSteps
    #: DDP wrapper of the model, once it ran; its buffers hold the reduced gradients.
    ddp: Callable[[], Any] = no_wrapper
    #: Per visit: L2 norm and number of elements of the residual stream after this layer.
    residual: list[tuple[Tensor, int]] = field(default_factory=list)
    #: The same for the latent input of the experts, in LatentMoE layers.
    latent: list[tuple[Tensor, int]] = field(default_factory=list)
    #: Per visit: tokens of each expert [N] (int64) on this rank.
    loads: list[Tensor] = field(default_factory=list)
    #: Tokens of each expert [N] over all steps since the last report.
    interval_load: Tensor | None = None

    def __post_init__(self) -> None:
        moe = next((m for m in self.module.modules() if isinstance(m, BaseMoELayer)), None)
        self.router: Any = None
        self.module.register_forward_hook(self._on_layer)
        if moe is not None:
            self.router = moe.router
            self.router.register_forward_hook(self._on_router, with_kwargs=True)
            if getattr(moe, "fc1_latent_proj", None) is not None:
                moe.fc1_latent_proj.register_forward_hook(self._on_latent)

    @property
    def has_data(self) -> bool:
        return bool(self.residual)

    def clear(self) -> None:
        self.residual, self.latent, self.loads = [], [], []
        self.interval_load = None

    def _counts(self, module: torch.nn.Module) -> bool:
        return module.training and first_forward()

    def _on_layer(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Collect the residual stream. Output: [s, b, d], or a tuple that begins with it."""
        if self.switch.on and self._counts(module) and len(self.residual) < LIMIT:
            self.residual.append(_norm_and_size(output))

    def _on_latent(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Collect the latent. Output: [s, b, l] and its bias."""
        if self.switch.on and self._counts(module) and len(self.latent) < LIMIT:
            self.latent.append(_norm_and_size(output))

    def _on_router(self, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        """Collect expert loads. Output: probabilities and routing map [tokens, N] (bool)."""
        if not self._counts(module):
            return
        routing_map = output[1]
        padding = kwargs.get("padding_mask", inputs[1] if len(inputs) > 1 else None)
        if padding is not None:  # True for padding tokens
            routing_map = routing_map & ~padding.reshape(-1, 1)
        load = routing_map.sum(dim=0)
        if self.switch.on and len(self.loads) < LIMIT:
            self.loads.append(load)
        # Not in place, because `loads` holds the same tensor.
        self.interval_load = load if self.interval_load is None else self.interval_load + load


@dataclass(eq=False)
class WatchedLoss:
    """The main loss of one model on the last pipeline stage, MTP not included."""

    switch: MeasuredSteps
    #: Per micro-batch: sum of the token losses under the mask, and number of these tokens.
    found: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def watch(self, model: torch.nn.Module) -> None:
        """Collect what `model` returns if it is token losses [b, s]; logits have three dimensions."""
        model.register_forward_hook(self._on_model, with_kwargs=True)

    def _on_model(self, module: torch.nn.Module, _inputs: Any, kwargs: Any, output: Any) -> None:
        counts = self.switch.on and module.training and first_forward() and len(self.found) < LIMIT
        if not counts or not isinstance(output, Tensor) or output.dim() != 2:
            return
        losses = output.detach().double()
        mask = kwargs.get("loss_mask")
        mask = torch.ones_like(losses) if mask is None else mask.reshape(losses.shape).double()
        self.found.append(((losses * mask).sum(), mask.sum()))

    def totals(self) -> Tensor | None:
        """[sum, tokens] of the step; None where no loss was computed."""
        return torch.stack([torch.stack(pair) for pair in self.found]).sum(0) if self.found else None


def _norm_and_size(output: Any) -> tuple[Tensor, int]:
    x = (output[0] if isinstance(output, tuple) else output).detach()
    return torch.linalg.vector_norm(x, dtype=torch.float32), x.numel()
