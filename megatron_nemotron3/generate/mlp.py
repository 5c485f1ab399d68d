"""The dense MLP: x + W2 relu(W1 norm(x))^2."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_nemotron3.generate.layers import Read, norm, transposed
from megatron_nemotron3.generate.span import Span
from megatron_nemotron3.generate.state import LayerState
from megatron_nemotron3.models import Nemotron3Config


class MLP:
    """Layer kind -."""

    def __init__(self, read: Read, config: Nemotron3Config) -> None:
        d, width = config.hidden_size, config.dense_ffn_hidden_size
        assert width is not None
        self.norm = norm(read, config)
        self.up = transposed(read("mixer.up_proj.weight", width, d))
        self.down = transposed(read("mixer.down_proj.weight", d, width))

    def new_state(self, batch: int, capacity: int) -> None:
        """Nothing is kept."""

    def __call__(self, x: Tensor, state: LayerState, span: Span) -> tuple[Tensor, None]:
        hidden = torch.mm(self.norm(x), self.up).relu_()
        return torch.addmm(x, hidden.mul_(hidden), self.down), None
