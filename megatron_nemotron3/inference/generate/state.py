"""What the layers keep of a sequence: KV caches of attention, convolution windows and states of Mamba-2.

A KV cache grows with the sequence, by 2 * groups * head dimension elements per token and attention layer.
A Mamba-2 layer keeps [kernel - 1, channels] and [heads, head dimension, state] elements at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys and values [b, 2, groups, capacity, head dimension]; undefined beyond a row's length."""

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache

    def reserve(self, length: int) -> Tensor:
        """Return the cache with room for `length` tokens a row; the capacity grows by doubling."""
        capacity = self.cache.shape[3]
        if length > capacity:
            while capacity < length:
                capacity = max(64, 2 * capacity)
            # Masked positions must still be finite: a score of -inf gives weight 0, and 0 * nan is nan.
            self.cache = F.pad(self.cache, (0, 0, 0, capacity - self.cache.shape[3]))
        return self.cache

    def select(self, rows: list[int]) -> KVCache:
        return KVCache(self.cache[rows])

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


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
    #: [b, h, n + 1, n + 1], from `mamba.decay_table`.
    decay: Tensor
    #: [b, n, h, p].
    x: Tensor
    #: [b, n, g, k].
    B: Tensor

    def after(self, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Window [b, kernel - 1, channels] and state [b, h, p, k] after each row's first `kept` tokens."""
        width, m = self.window.shape[1] - self.x.shape[1], kept[0]
        if min(kept) != max(kept):
            counts = torch.tensor(list(kept)).to(self.x.device, non_blocking=True)
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


LayerState = KVCache | MambaState | None


@dataclass(frozen=True)
class Rollback:
    """What `DecodeState.truncate` needs to undo a pass, or the end of it.

    lengths: of the rows before the pass; counts: tokens of each row in it.
    layers: one entry per layer, None for kinds other than Mamba-2.
    """

    lengths: list[int]
    counts: list[int]
    layers: list[MambaPass | None]


class DecodeState:
    """States of all layers of a stack (None for kinds without one), and the tokens that each row has seen."""

    def __init__(self, lengths: list[int], layers: list[LayerState]) -> None:
        self.lengths, self.layers = lengths, layers

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def truncate(self, keep: int | Sequence[int], rollback: Rollback) -> None:
        """Roll the last pass back so that each row keeps the first `keep` of its tokens."""
        kept = [keep] * self.batch if isinstance(keep, int) else list(keep)
        if len(kept) != self.batch or not all(0 <= k <= c for k, c in zip(kept, rollback.counts)):
            raise ValueError(
                f"cannot keep {kept} tokens of a pass with {rollback.counts}: give one number per row, from "
                "0 to its tokens"
            )
        if self.lengths != [a + c for a, c in zip(rollback.lengths, rollback.counts)]:
            raise ValueError(
                f"the state has lengths {self.lengths}, but the pass added {rollback.counts} tokens to "
                f"{rollback.lengths}: give the rollback of the last pass"
            )
        if kept == rollback.counts:
            return
        for layer, record in zip(self.layers, rollback.layers, strict=True):
            if isinstance(layer, MambaState):
                assert record is not None
                layer.set_lazily(record, kept)
        self.lengths = [a + k for a, k in zip(rollback.lengths, kept)]

    def select(self, rows: Sequence[int]) -> DecodeState:
        """Return a copy of some rows, in the given order; a row may occur several times."""
        layers = [None if layer is None else layer.select(list(rows)) for layer in self.layers]
        return DecodeState([self.lengths[row] for row in rows], layers)

    def copy(self) -> DecodeState:
        return self.select(range(self.batch))
