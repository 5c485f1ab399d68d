"""The scan of Mamba-2 over few tokens, in place of `layers.ssd` where a state comes in and one goes out.

    decays            how much of the state after i tokens remains after j, for all i <= j
    short_scan        n tokens as one cell of the chunked form (arXiv 2405.21060, section 6)
    MambaTape.after   the state after the first m tokens of a pass

`layers.ssd.ssd_chunked` is for training: it cuts, saves and pads, which costs more than the scan of a dozen
tokens. Shapes as there; k is the size of a state. A column for the state that enters makes one table of all
decays, whose row m belongs to the state after m tokens, so that going back into a pass costs one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Tokens up to which `short_scan` is quicker on a CPU than `ssd_chunked`.
SHORT = 32
#: Tokens of the longest pass that can be gone back into. The work of `decays` grows with their cube.
LONGEST = 128


def decays(dt: Tensor, A: Tensor) -> Tensor:
    """exp of the sum of dt A over tokens, each sum on its own: differences of running sums would lose digits.

    Args:
        dt: [b, n, h].   A: [h], negative.

    Returns:
        [b, h, n + 1, n + 1]: from the state after i tokens (column) to the one after j (row); 0 for i > j.
    """
    b, n, h = dt.shape
    between, never = _between(n, dt.device)
    return (
        torch.addmm(never, (dt * A).transpose(1, 2).reshape(b * h, n), between).exp_().view(b, h, n + 1, -1)
    )


def short_scan(
    x: Tensor, dt: Tensor, decay: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> Tensor:
    """n tokens at once, by products of matrices n wide.

    Args:
        x: [b, n, h, p].   dt: [b, n, h].   decay: `decays`.   B, C: [b, n, g, k].   D: [h].
        state: [b, h, p, k], not changed. All FP32.

    Returns:
        [b, n, h, p]. The states are for `MambaTape.after`.
    """
    b, n, h, p = x.shape
    g, k = B.shape[2:]
    C_ = C.permute(0, 2, 3, 1).reshape(b * g, k, n)
    scores = torch.bmm(B.transpose(1, 2).reshape(b * g, n, k), C_)  # [b * g, earlier token, token]
    mixing = decay[:, :, 1:, 1:].transpose(2, 3) * dt.transpose(1, 2).unsqueeze(-1)  # [b, h, earlier, token]
    mixing.view(b * g, h // g, n, n).mul_(scores.unsqueeze(1))
    x_ = x.permute(0, 2, 3, 1).reshape(b * h, p, n)
    y = torch.bmm(x_, mixing.view(b * h, n, n)).view(b, h, p, n)
    entering = torch.bmm(state.view(b * g, -1, k), C_).view(b, h, p, n)
    y.addcmul_(entering, decay[:, :, 1:, 0].unsqueeze(2))
    y.addcmul_(x_.view(b, h, p, n), D.view(h, 1, 1))
    return y.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class MambaTape:
    """How to come to any state of a Mamba-2 layer inside a pass over n tokens.

    The state after m of them is a multiple of the entering one and a sum over m tokens: nothing of the size
    of a state is kept for each token.
    """

    #: [b, kernel - 1 + n, channels]: the entering window and the n inputs.
    window: Tensor
    #: [b, h, p, k]: the entering state.
    ssm: Tensor
    #: [b, n, h], after softplus.   decay: `decays`.
    dt: Tensor
    decay: Tensor
    #: [b, n, h, p] and [b, n, g, k].
    x: Tensor
    B: Tensor

    def after(self, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Window [b, kernel - 1, channels] and state [b, h, p, k] after each row's first `kept` tokens."""
        b, n, h, p = self.x.shape
        width, m = self.window.shape[1] - n, kept[0]
        if min(kept) == max(kept):
            window, decay = self.window[:, m : m + width], self.decay[:, :, m]
            if m == 0:
                return window, self.ssm
        else:
            counts = torch.tensor(list(kept), device=self.x.device)
            window = tail(self.window, counts.unsqueeze(1), width)
            decay = self.decay[torch.arange(b, device=self.x.device), :, counts]
        g, k = self.B.shape[2:]
        weight = decay[:, :, 1:] * self.dt.transpose(1, 2)  # [b, h, n]
        u = (self.x.permute(0, 2, 3, 1) * weight.unsqueeze(2)).reshape(b * g, -1, n)
        added = torch.bmm(u, self.B.transpose(1, 2).reshape(b * g, n, k)).view(b, h, p, k)
        return window, added.addcmul_(self.ssm, decay[:, :, :1].unsqueeze(-1))


def tail(window: Tensor, counts: Tensor, width: int) -> Tensor:
    """The `width` inputs in front of each row's end: window [b, width + n, c], counts [b, 1] of n."""
    places = counts + torch.arange(width, device=window.device)
    return window.gather(1, places.unsqueeze(-1).expand(-1, -1, window.shape[2]))


_BETWEEN: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def _between(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For row j and column i of n + 1: which of n tokens are behind i and not behind j; -inf where i > j."""
    if (n, device) not in _BETWEEN:
        row, column = torch.arange(n + 1).view(-1, 1), torch.arange(n + 1)
        token = torch.arange(n).view(-1, 1, 1)
        between = ((token >= column) & (token < row)).float().view(n, -1)
        never = torch.zeros(n + 1, n + 1).masked_fill_(column > row, -torch.inf).flatten()
        _BETWEEN[n, device] = between.to(device), never.to(device)
    return _BETWEEN[n, device]
