"""Whether weights change from one measurement to the next, and the learning rate that they get."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.hooks import MeasuredSteps, first_forward
from megatron_nemotron3.common.switches import megatron_options
from megatron_nemotron3.launch import boosting
from megatron_nemotron3.models import lora

#: Elements of a weight that are summed at a time.
_AT_ONCE = 1 << 22
#: Bytes of an element -> integers of that size.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WatchedUpdates:
    """The weight matrices of a process: for each row the sum of its bits, in the last two measured steps.

    Vectors do not count: in BF16 those of norms may rest for many steps in a healthy run.
    """

    def __init__(self, switch: MeasuredSteps) -> None:
        self.switch = switch
        #: Set by the DDP wrapper. With FSDP a rank has no whole weights outside of a forward.
        self.in_ddp = False
        #: Rates of the optimizers of this rank in the measured step.
        self.rates: list[Any] = []
        self._now: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._only_trained = _frozen_on_purpose()

    def watch(self, name: str, module: torch.nn.Module) -> None:
        """Watch the matrices of a module. Behind its forward they have been gathered."""
        module.register_forward_hook(partial(self._on_forward, name))

    def _on_forward(self, name: str, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if self.switch.on and self.in_ddp and name not in self._now and module.training and first_forward():
            wanted = [p for p in module.parameters() if p.requires_grad or not self._only_trained]
            if sums := [_row_sums(p) for p in wanted if p.dim() > 1 and _has_plain_bits(p)]:
                self._now[name] = torch.cat(sums)

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Keep the rates of an optimizer."""
        if self.switch.on:
            self.rates += [group["lr"] for group in optimizer.param_groups]

    def take(self) -> tuple[dict[str, Tensor], float | None]:
        """By module: [rows that are what they were, rows], float64; and the largest rate of this step."""
        found = {
            name: torch.stack([(now == self._before[name]).sum(), now.new_tensor(now.numel())]).double()
            for name, now in self._now.items()
            if name in self._before and self._before[name].shape == now.shape
        }
        rate = max(map(float, self.rates), default=None)
        self._before, self._now, self.rates = self._now, {}, []
        return found, rate


def _frozen_on_purpose() -> bool:
    """Whether the run is one of those that train a part of the weights."""
    options = megatron_options()
    frozen = getattr(options, "freeze", None) or getattr(options, "freeze_all_layers", False)
    return bool(frozen or lora.in_environment() or boosting.in_environment())


def _has_plain_bits(parameter: Tensor) -> bool:
    """Whether a weight is not quantized."""
    return type(parameter.data) is Tensor and parameter.element_size() in _BITS


def _row_sums(weight: Tensor) -> Tensor:
    bits = weight.detach().view(_BITS[weight.element_size()]).flatten(1)
    # A sum of int16 as int64 copies what it sums.
    rows = max(1, _AT_ONCE // max(1, bits.shape[1]))
    return torch.cat([some.sum(1, dtype=torch.int64) for some in bits.split(rows)])
