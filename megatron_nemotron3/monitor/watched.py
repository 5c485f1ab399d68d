"""What one layer collects while a step runs. Forward hooks only: nothing here changes a tensor.

A hook counts the first forward of a micro-batch. The one that activation recomputation repeats runs inside
the backward pass and is left out; so is evaluation, where modules are not in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from megatron_nemotron3.monitor.hooks import first_forward, no_wrapper

#: Visits kept without a report; more means that nobody ever asks (a loop that is not Megatron's).
LIMIT = 16_384


@dataclass
class Switch:
    """Shared by all layers: whether this step is measured."""

    on: bool = True


@dataclass(eq=False)
class WatchedLayer:
    """One layer of the stack: its names, and what its hooks saw since the last report.

    `rows` has one name per visit of a micro-batch: a decoder layer has one, an MTP layer that is repeated
    one per depth, in order. `name` is the layer's own, for what belongs to weights and not to visits.
    """

    name: str
    rows: tuple[str, ...]
    module: torch.nn.Module
    switch: Switch
    #: The DDP wrapper of the model this layer is in, once it ran; its buffers hold the reduced gradients.
    ddp: Callable[[], Any] = no_wrapper
    #: Per visit: L2 norm and number of elements of the residual stream behind this layer.
    residual: list[tuple[Tensor, int]] = field(default_factory=list)
    #: The same of what the experts read, where there is a latent width.
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
        """Whether this layer was trained since the last report."""
        return bool(self.residual)

    def clear(self) -> None:
        """Forget the step and the interval."""
        self.residual, self.latent, self.loads = [], [], []
        self.interval_load = None

    def _counts(self, module: torch.nn.Module) -> bool:
        return module.training and first_forward()

    def _on_layer(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Output: [s, b, d], or a tuple that begins with it."""
        if self.switch.on and self._counts(module) and len(self.residual) < LIMIT:
            self.residual.append(_norm_and_size(output))

    def _on_latent(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Output: [s, b, l] and its bias."""
        if self.switch.on and self._counts(module) and len(self.latent) < LIMIT:
            self.latent.append(_norm_and_size(output))

    def _on_router(self, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        """Output: probabilities and routing map [tokens, N] (bool)."""
        if not self._counts(module):
            return
        routing_map = output[1]
        padding = kwargs.get("padding_mask", inputs[1] if len(inputs) > 1 else None)
        if padding is not None:  # True: a token that is padding
            routing_map = routing_map & ~padding.reshape(-1, 1)
        load = routing_map.sum(dim=0)
        if self.switch.on and len(self.loads) < LIMIT:
            self.loads.append(load)
        # Out of place: `load` is kept as it is above.
        self.interval_load = load if self.interval_load is None else self.interval_load + load


def _norm_and_size(output: Any) -> tuple[Tensor, int]:
    x = (output[0] if isinstance(output, tuple) else output).detach()
    return torch.linalg.vector_norm(x, dtype=torch.float32), x.numel()
