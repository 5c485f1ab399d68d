"""The Mamba-2 mixer with its state: one token, a few, or many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.generate.layers import Norm, Read, norm, transposed
from megatron_nemotron3.generate.scan import SHORT, MambaTape, decays, short_scan, tail
from megatron_nemotron3.generate.span import Span
from megatron_nemotron3.generate.state import LayerState, MambaState
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.ssd import ssd_chunked
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON


class Mamba:
    """Layer kind M. Convolution, scan and gated norm are FP32, as is the state."""

    def __init__(self, read: Read, config: Nemotron3Config) -> None:
        c, d = config, config.hidden_size
        self.heads, self.head_dim = c.mamba_num_heads, c.mamba_head_dim
        self.groups, self.state_dim, self.kernel = c.mamba_num_groups, c.mamba_state_dim, c.mamba_conv_kernel
        self.inner, bc = c.mamba_inner_size, c.mamba_num_groups * c.mamba_state_dim
        self.channels = self.inner + 2 * bc
        self.in_parts = (self.inner, self.channels, self.heads)
        self.conv_parts = (self.inner, bc, bc)
        self.norm = norm(read, config)
        self.in_proj = transposed(read("mixer.in_proj.weight", sum(self.in_parts), d))
        taps = read("mixer.conv1d.weight", self.channels, 1, self.kernel, float32=True)
        self.taps = taps.squeeze(1).t().contiguous()  # [kernel, channels]
        self.bias = read("mixer.conv1d.bias", self.channels, float32=True)
        self.A = -read("mixer.A_log", self.heads, float32=True).exp()
        self.D = read("mixer.D", self.heads, float32=True)
        self.dt_bias = read("mixer.dt_bias", self.heads, float32=True)
        gain = read("mixer.norm.weight", self.inner, float32=True)
        self.gated_norm = Norm(gain, GATED_NORM_EPSILON, self.groups)
        self.out = transposed(read("mixer.out_proj.weight", d, self.inner))

    def new_state(self, batch: int, capacity: int) -> MambaState:
        """Zeros."""
        window = self.in_proj.new_zeros(batch, self.kernel - 1, self.channels)
        ssm = self.A.new_zeros(batch, self.heads, self.head_dim, self.state_dim)
        return MambaState(window, ssm)

    def __call__(self, x: Tensor, state: LayerState, span: Span) -> tuple[Tensor, MambaTape | None]:
        assert isinstance(state, MambaState)
        z, xbc, dt = torch.mm(self.norm(x), self.in_proj).split_with_sizes(self.in_parts, 1)
        if span.single:
            y, tape = self._step(xbc, dt, state), None
        else:
            y, tape = self._scan(xbc, dt, state, span)
        y = self.gated_norm(F.silu(z.float()).mul_(y))
        return torch.addmm(x, y.to(x.dtype), self.out), tape

    def _step(self, xbc: Tensor, dt: Tensor, state: MambaState) -> Tensor:
        """One token a row: xbc [b, channels], dt [b, heads] -> [b, inner]; the state changes in place."""
        b, h, p, g = len(xbc), self.heads, self.head_dim, self.groups
        window = torch.cat((state.window, xbc.unsqueeze(1)), 1)
        ssm = state.ssm
        state.set(window[:, 1:], ssm)
        u = F.silu((window * self.taps).sum(1).add_(self.bias), inplace=True)
        x, B, C = u.split_with_sizes(self.conv_parts, 1)
        dt = F.softplus(dt + self.dt_bias)
        x = x.reshape(b, h, p)
        cells = ssm.view(b * g, -1, self.state_dim)  # a group's heads lie side by side
        ssm.mul_((dt * self.A).exp_().view(b, h, 1, 1))
        cells.baddbmm_((x * dt.unsqueeze(-1)).view(b * g, -1, 1), B.reshape(b * g, 1, -1))
        y = torch.bmm(cells, C.reshape(b * g, -1, 1)).view(b, h, p)
        return y.addcmul_(x, self.D.unsqueeze(-1)).view(b, -1)

    def _scan(
        self, xbc: Tensor, dt: Tensor, state: MambaState, span: Span
    ) -> tuple[Tensor, MambaTape | None]:
        """n tokens a row: xbc [b * n, channels] -> [b * n, inner]; the state is replaced."""
        b, n, h, g, ssm = span.b, span.n, self.heads, self.groups, state.ssm
        inputs = xbc.view(b, n, -1)
        window = torch.cat((state.window, inputs), 1)  # [b, kernel - 1 + n, channels]
        if n <= SHORT:
            taken = window.unfold(1, self.kernel, 1).transpose(2, 3)  # [b, n, kernel, channels], a view
            u = F.silu((taken * self.taps).sum(2).add_(self.bias), inplace=True)
        else:
            u = causal_conv1d(inputs.float(), self.taps.t(), self.bias, initial_state=state.window.float())
        x, B, C = u.split_with_sizes(self.conv_parts, 2)
        x, B, C = x.view(b, n, h, -1), B.view(b, n, g, -1), C.view(b, n, g, -1)
        dt = F.softplus(dt.float() + self.dt_bias).view(b, n, h)
        if span.valid is not None:
            dt = dt * span.valid.unsqueeze(-1)  # a step of zero leaves the state as it is
        if n <= SHORT or span.keep:
            decay = decays(dt, self.A)
            y = short_scan(x, dt, decay, B, C, self.D, ssm)
            tape = MambaTape(window, ssm, dt, decay, x, B)
            state.set_later(tape, span.counts)
        else:
            y, ssm = ssd_chunked(x, dt, self.A, B, C, D=self.D, initial_state=ssm, return_final_state=True)
            counts = torch.tensor(span.counts, device=xbc.device).unsqueeze(1)
            state.set(tail(window, counts, self.kernel - 1), ssm)
            tape = None
        return y.reshape(b * n, -1), tape
