"""Convolution and scan of Mamba-2 with their state: one token, a few, or many.

`short_scan` computes up to `SHORT` tokens as one chunk (arXiv 2405.21060, section 6). Its table of decays has
one column for the initial state, so that row m of it belongs to the state after m tokens and rolling back
costs one matrix product (`MambaPass.after`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch, on_device
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.ssd import ssd_chunked
from megatron_nemotron3.models import Nemotron3Config

#: Tokens up to which `short_scan` is faster on a CPU than `ssd_chunked`.
SHORT = 32


@dataclass(frozen=True)
class MambaPass:
    """The scan of a Mamba-2 layer over n tokens: its inputs, and the state after any of the tokens.

    The state after m tokens is a multiple of the initial one plus a sum over m tokens, so no state is stored
    per token. h: heads, p: head dimension, g: groups, k: size of a state; all but `window` FP32.
    """

    #: [b, kernel - 1 + n, channels]: the initial convolution window and the n inputs.
    window: Tensor
    #: [b, h, p, k]: the initial state.
    ssm: Tensor
    #: [b, n, h], after softplus.
    dt: Tensor
    #: [b, h, n + 1, n + 1], from `decay_table`.
    decay: Tensor
    #: [b, n, h, p].
    x: Tensor
    #: [b, n, g, k].
    B: Tensor

    def after(self, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Window [b, kernel - 1, channels] and state [b, h, p, k] after each row's first `kept` tokens."""
        width, m = self.window.shape[1] - self.x.shape[1], kept[0]
        if min(kept) != max(kept):
            counts = on_device(kept, self.x.device)
            rows = torch.arange(len(kept), device=counts.device)
            window = window_after(self.window, counts.unsqueeze(1), width)
            return window, self._state(self.decay[rows, :, counts, 0], self.weight[rows, :, counts])
        window = self.window[:, m : m + width]
        if m == 0:
            return window, self.ssm
        return window, self._state(self.decay[:, :, m, 0], self.weight[:, :, m])

    @cached_property
    def weight(self) -> Tensor:
        """[b, h, n + 1, n]: what token i (column) adds to the state after j tokens (row), times x and B."""
        return self.decay[:, :, :, 1:] * self.dt.transpose(1, 2).unsqueeze(2)

    def _state(self, decay: Tensor, weight: Tensor) -> Tensor:
        """The state [b, h, p, k], from `decay` [b, h] of the initial one and `weight` [b, h, n] of tokens."""
        b, n, h, p = self.x.shape
        g, k = self.B.shape[2:]
        u = (self.x.permute(0, 2, 3, 1) * weight.unsqueeze(2)).reshape(b * g, -1, n)
        added = torch.bmm(u, self.B.transpose(1, 2).reshape(b * g, n, k)).view(b, h, p, k)
        return added.addcmul_(self.ssm, decay.view(b, h, 1, 1))


def window_after(window: Tensor, counts: Tensor, width: int) -> Tensor:
    """The last `width` inputs up to each row's end: window [b, width + n, c], counts [b, 1] of the n."""
    positions = counts + torch.arange(width, device=window.device)
    return window.gather(1, positions.unsqueeze(-1).expand(-1, -1, window.shape[2]))


class MambaState:
    """State of one Mamba-2 layer.

    window: [b, kernel - 1, channels], the last inputs of the convolution, oldest first.
    ssm: [b, heads, head dimension, state], FP32.
    """

    def __init__(self, window: Tensor, ssm: Tensor) -> None:
        self._window, self._ssm = window, ssm
        self._pending: tuple[MambaPass, Sequence[int]] | None = None

    @property
    def window(self) -> Tensor:
        self._compute_pending()
        return self._window

    @property
    def ssm(self) -> Tensor:
        self._compute_pending()
        return self._ssm

    def set(self, window: Tensor, ssm: Tensor) -> None:
        self._window, self._ssm, self._pending = window, ssm, None

    def set_lazily(self, record: MambaPass, kept: Sequence[int]) -> None:
        """Set the state after each row's first `kept` tokens of a pass; it is computed when it is read.

        How many drafted tokens stay is known only after their pass, so no state is computed twice.
        """
        self._pending = record, kept

    def select(self, rows: list[int]) -> MambaState:
        return MambaState(self.window[rows], self.ssm[rows])

    @property
    def nbytes(self) -> int:
        return self.window.nbytes + self.ssm.nbytes

    def _compute_pending(self) -> None:
        if self._pending is not None:
            record, kept = self._pending
            self.set(*record.after(kept))


class Recurrence:
    """Convolution and scan of one layer, FP32 as its state.

    Args:
        taps, bias: of the convolution, [channels, 1, kernel] and [channels].
        A_log, D, dt_bias: [heads].
    """

    def __init__(
        self, c: Nemotron3Config, taps: Tensor, bias: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor
    ) -> None:
        self.heads, self.head_dim = c.mamba_num_heads, c.mamba_head_dim
        self.groups, self.state_dim = c.mamba_num_groups, c.mamba_state_dim
        bc = self.groups * self.state_dim
        self.parts = (c.mamba_inner_size, bc, bc)
        self.taps = taps.squeeze(1).t().contiguous()  # [kernel, channels]
        self.bias, self.A, self.D, self.dt_bias = bias, -A_log.exp(), D, dt_bias

    def new_state(self, batch: int, dtype: torch.dtype) -> MambaState:
        kernel, channels = self.taps.shape
        window = self.taps.new_zeros(batch, kernel - 1, channels, dtype=dtype)
        return MambaState(window, self.A.new_zeros(batch, self.heads, self.head_dim, self.state_dim))

    def step(self, xbc: Tensor, dt: Tensor, state: MambaState) -> Tensor:
        """One token a row: xbc [b, channels], dt [b, heads] -> [b, inner]; changes the state in place."""
        b, h, p, g = len(xbc), self.heads, self.head_dim, self.groups
        window = torch.cat((state.window, xbc.unsqueeze(1)), 1)
        ssm = state.ssm
        state.set(window[:, 1:], ssm)
        u = F.silu((window * self.taps).sum(1).add_(self.bias), inplace=True)
        x, B, C = u.split_with_sizes(self.parts, 1)
        dt = F.softplus(dt + self.dt_bias)
        x = x.reshape(b, h, p)
        by_group = ssm.view(b * g, -1, self.state_dim)  # the heads of a group are adjacent
        ssm.mul_((dt * self.A).exp_().view(b, h, 1, 1))
        by_group.baddbmm_((x * dt.unsqueeze(-1)).view(b * g, -1, 1), B.reshape(b * g, 1, -1))
        y = torch.bmm(by_group, C.reshape(b * g, -1, 1)).view(b, h, p)
        return y.addcmul_(x, self.D.unsqueeze(-1)).view(b, -1)

    def scan(
        self, xbc: Tensor, dt: Tensor, state: MambaState, run: ForwardBatch
    ) -> tuple[Tensor, MambaPass | None]:
        """n tokens a row: xbc [b * n, channels] -> [b * n, inner]; replaces the state."""
        b, n, h, g, ssm = run.b, run.n, self.heads, self.groups, state.ssm
        kernel, inputs = len(self.taps), xbc.view(b, n, -1)
        window = torch.cat((state.window, inputs), 1)  # [b, kernel - 1 + n, channels]
        if n <= SHORT:
            taken = window.unfold(1, kernel, 1).transpose(2, 3)  # [b, n, kernel, channels], a view
            u = F.silu((taken * self.taps).sum(2).add_(self.bias), inplace=True)
        else:
            u = causal_conv1d(window.float(), self.taps.t(), self.bias)[:, kernel - 1 :]
        x, B, C = u.split_with_sizes(self.parts, 2)
        x, B, C = x.view(b, n, h, -1), B.view(b, n, g, -1), C.view(b, n, g, -1)
        dt = F.softplus(dt.float() + self.dt_bias).view(b, n, h)
        if run.valid is not None:
            dt = dt * run.valid.unsqueeze(-1)  # a time step of zero leaves the state unchanged
        record = None
        if n <= SHORT or run.rollback:
            record = MambaPass(window, ssm, dt, decay_table(dt, self.A), x, B)
            y = short_scan(record, C, self.D)
            state.set_lazily(record, run.counts)
        else:
            y, ssm = ssd_chunked(x, dt, self.A, B, C, D=self.D, initial_state=ssm, return_final_state=True)
            state.set(window_after(window, on_device(run.counts, xbc.device).unsqueeze(1), kernel - 1), ssm)
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
