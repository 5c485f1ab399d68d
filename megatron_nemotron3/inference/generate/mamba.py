"""The Mamba-2 mixer with its state: one token, a few, or many.

`layers.ssd.ssd_chunked` is made for training: it splits, saves and pads, which costs more than the scan of a
dozen tokens. `short_scan` computes up to `SHORT` tokens as one chunk (arXiv 2405.21060, section 6). Its table
of decays has one column for the initial state, so that row m of it belongs to the state after m tokens and
rolling back costs one matrix product (`state.MambaPass.after`).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch, on_device
from megatron_nemotron3.inference.generate.layers import GroupNorm, ReadTensor, read_norm
from megatron_nemotron3.inference.generate.linear import DecodeLinear
from megatron_nemotron3.inference.generate.state import LayerState, MambaPass, MambaState, window_after
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.ssd import ssd_chunked
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON

#: Tokens up to which `short_scan` is faster on a CPU than `ssd_chunked`.
SHORT = 32


class Mamba:
    """Layer kind M. Convolution, scan and gated norm are FP32, as is the state."""

    def __init__(self, read: ReadTensor, config: Nemotron3Config) -> None:
        c, d = config, config.hidden_size
        self.heads, self.head_dim = c.mamba_num_heads, c.mamba_head_dim
        self.groups, self.state_dim, self.kernel = c.mamba_num_groups, c.mamba_state_dim, c.mamba_conv_kernel
        self.inner, bc = c.mamba_inner_size, c.mamba_num_groups * c.mamba_state_dim
        self.channels = self.inner + 2 * bc
        self.in_parts = (self.inner, self.channels, self.heads)
        self.conv_parts = (self.inner, bc, bc)
        self.norm = read_norm(read, config)
        self.in_proj = DecodeLinear(read("mixer.in_proj.weight", sum(self.in_parts), d))
        taps = read("mixer.conv1d.weight", self.channels, 1, self.kernel, float32=True)
        self.taps = taps.squeeze(1).t().contiguous()  # [kernel, channels]
        self.bias = read("mixer.conv1d.bias", self.channels, float32=True)
        self.A = -read("mixer.A_log", self.heads, float32=True).exp()
        self.D = read("mixer.D", self.heads, float32=True)
        self.dt_bias = read("mixer.dt_bias", self.heads, float32=True)
        gain = read("mixer.norm.weight", self.inner, float32=True)
        self.gated_norm = GroupNorm(gain, GATED_NORM_EPSILON, self.groups)
        self.out = DecodeLinear(read("mixer.out_proj.weight", d, self.inner))

    def new_state(self, batch: int, capacity: int) -> MambaState:
        window = self.norm.zeros(batch, self.kernel - 1, self.channels)
        ssm = self.A.new_zeros(batch, self.heads, self.head_dim, self.state_dim)
        return MambaState(window, ssm)

    def __call__(self, x: Tensor, state: LayerState, batch: ForwardBatch) -> tuple[Tensor, MambaPass | None]:
        assert isinstance(state, MambaState)
        z, xbc, dt = self.in_proj(self.norm(x)).split_with_sizes(self.in_parts, 1)
        if batch.single_token:
            y, record = self._step(xbc, dt, state), None
        else:
            y, record = self._scan(xbc, dt, state, batch)
        y = self.gated_norm(F.silu(z.float()).mul_(y))
        return self.out(y.to(x.dtype), add=x), record

    def _step(self, xbc: Tensor, dt: Tensor, state: MambaState) -> Tensor:
        """One token a row: xbc [b, channels], dt [b, heads] -> [b, inner]; changes the state in place."""
        b, h, p, g = len(xbc), self.heads, self.head_dim, self.groups
        window = torch.cat((state.window, xbc.unsqueeze(1)), 1)
        ssm = state.ssm
        state.set(window[:, 1:], ssm)
        u = F.silu((window * self.taps).sum(1).add_(self.bias), inplace=True)
        x, B, C = u.split_with_sizes(self.conv_parts, 1)
        dt = F.softplus(dt + self.dt_bias)
        x = x.reshape(b, h, p)
        by_group = ssm.view(b * g, -1, self.state_dim)  # the heads of a group are adjacent
        ssm.mul_((dt * self.A).exp_().view(b, h, 1, 1))
        by_group.baddbmm_((x * dt.unsqueeze(-1)).view(b * g, -1, 1), B.reshape(b * g, 1, -1))
        y = torch.bmm(by_group, C.reshape(b * g, -1, 1)).view(b, h, p)
        return y.addcmul_(x, self.D.unsqueeze(-1)).view(b, -1)

    def _scan(
        self, xbc: Tensor, dt: Tensor, state: MambaState, batch: ForwardBatch
    ) -> tuple[Tensor, MambaPass | None]:
        """n tokens a row: xbc [b * n, channels] -> [b * n, inner]; replaces the state."""
        b, n, h, g, ssm = batch.b, batch.n, self.heads, self.groups, state.ssm
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
        if batch.valid is not None:
            dt = dt * batch.valid.unsqueeze(-1)  # a time step of zero leaves the state unchanged
        record = None
        if n <= SHORT or batch.rollback:
            record = MambaPass(window, ssm, dt, decay_table(dt, self.A), x, B)
            y = short_scan(record, C, self.D)
            state.set_lazily(record, batch.counts)
        else:
            y, ssm = ssd_chunked(x, dt, self.A, B, C, D=self.D, initial_state=ssm, return_final_state=True)
            counts = on_device(batch.counts, xbc.device).unsqueeze(1)
            state.set(window_after(window, counts, self.kernel - 1), ssm)
        return y.reshape(b * n, -1), record


def decay_table(dt: Tensor, A: Tensor) -> Tensor:
    """exp of the sum of dt A over tokens. Each sum is formed on its own: running sums would lose digits."""
    b, n, h = dt.shape
    between, never = _token_ranges(n, dt.device)
    sums = torch.addmm(never, (dt * A).transpose(1, 2).reshape(b * h, n), between)
    return sums.exp_().view(b, h, n + 1, -1)


def short_scan(scan: MambaPass, C: Tensor, D: Tensor) -> Tensor:
    """Output of n tokens at once, by matrix products of width n."""
    b, n, h, p = scan.x.shape
    g, k = C.shape[2:]
    # With one row of a batch each of these is a view.
    C_ = C.transpose(1, 2).reshape(b * g, n, k)
    B_ = scan.B.permute(0, 2, 3, 1).reshape(b * g, k, n)
    x_ = scan.x.transpose(1, 2).reshape(b * h, n, p)
    # [b, h, token, earlier token]
    scores = torch.bmm(C_, B_).view(b, g, 1, n, n)
    mixing = torch.mul(scan.weight[:, :, 1:].view(b, g, -1, n, n), scores).view(b, h, n, n)
    mixing.diagonal(dim1=2, dim2=3).add_(D.unsqueeze(-1))
    mixed = torch.bmm(mixing.view(b * h, n, n), x_).view(b, h, n, p)
    from_initial = torch.bmm(C_, scan.ssm.view(b * g, -1, k).transpose(1, 2)).view(b, g, n, -1, p)
    y = mixed.new_empty(b, n, h, p)
    by_group = mixed.transpose(1, 2).view(b, n, g, -1, p)
    decay = scan.decay[:, :, 1:, :1].transpose(1, 2).view(b, n, g, -1, 1)
    torch.addcmul(by_group, from_initial.transpose(1, 2), decay, out=y.view(b, n, g, -1, p))
    return y


@cache
def _token_ranges(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For row j and column i of n + 1: which of n tokens lie after i and up to j; and -inf where i > j."""
    row, column = torch.arange(n + 1).view(-1, 1), torch.arange(n + 1)
    token = torch.arange(n).view(-1, 1, 1)
    between = ((token >= column) & (token < row)).float().view(n, -1)
    never = torch.zeros(n + 1, n + 1).masked_fill_(column > row, -torch.inf).flatten()
    return between.to(device, non_blocking=True), never.to(device, non_blocking=True)
