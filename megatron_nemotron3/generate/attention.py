"""Grouped-query attention without positions, over cached keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.generate.layers import Read, norm, transposed
from megatron_nemotron3.generate.span import Span
from megatron_nemotron3.generate.state import KeyValues, LayerState
from megatron_nemotron3.models import Nemotron3Config


class Attention:
    """Layer kind *."""

    def __init__(self, read: Read, config: Nemotron3Config) -> None:
        c, d = config, config.hidden_size
        self.heads, self.groups, self.width = c.num_attention_heads, c.num_query_groups, c.kv_channels
        q, kv = self.heads * self.width, self.groups * self.width
        self.norm = norm(read, config)
        parts = (("q", q), ("k", kv), ("v", kv))
        weights = [read(f"mixer.{name}_proj.weight", rows, d) for name, rows in parts]
        self.qkv = transposed(torch.cat(weights))
        self.out = transposed(read("mixer.o_proj.weight", d, q))

    def new_state(self, batch: int, capacity: int) -> KeyValues:
        """Room for `capacity` tokens a row."""
        return KeyValues(self.qkv.new_zeros(batch, 2, self.groups, capacity, self.width))

    def __call__(self, x: Tensor, state: LayerState, span: Span) -> tuple[Tensor, None]:
        assert isinstance(state, KeyValues)
        b, n, groups, c = span.b, span.n, self.groups, self.width
        per_group = self.heads // groups
        qkv = torch.mm(self.norm(x), self.qkv).view(b, n, self.heads + 2 * groups, c)
        cache = state.reserve(span.end)
        kv = qkv[:, :, self.heads :].view(b, n, 2, groups, c)
        if span.positions is not None:
            cache[span.rows, :, :, span.positions] = kv
        else:
            cache[:, :, :, span.start : span.end] = kv.permute(0, 2, 3, 1, 4)
        q = qkv[:, :, : self.heads].view(b, n, groups, per_group, c).permute(0, 2, 3, 1, 4)
        if n == 1:
            keys, values = cache[:, 0, :, : span.end], cache[:, 1, :, : span.end]
            mask = span.mask(0, 1, span.end, 1, q.dtype)
            y = F.scaled_dot_product_attention(q.squeeze(3), keys, values, attn_mask=mask)
            return torch.addmm(x, y.reshape(b, -1), self.out), None
        if span.one_mask(per_group) or x.device.type != "cpu":
            y = self._in_tiles(q, cache, span)
        else:
            y = self._by_row(q, cache, span)
        return torch.addmm(x, y.view(b * n, -1), self.out), None

    def _in_tiles(self, q: Tensor, cache: Tensor, span: Span) -> Tensor:
        """All rows at once, as many queries as one mask may have.

        Args:
            q: [b, groups, heads a group, n, c].   cache: [b, 2, groups, tokens, c].

        Returns:
            [b, n, groups, heads a group, c].
        """
        b, groups, per_group, n, c = q.shape
        y = q.new_empty(b, n, groups, per_group, c)
        for first, stop in span.tiles(per_group):
            end = span.end if span.start is None else span.start + stop
            mask = span.mask(first, stop, end, per_group, q.dtype)
            # The queries of a group lie behind each other, so that no key is repeated for them.
            part = F.scaled_dot_product_attention(
                q[:, :, :, first:stop].reshape(b, groups, -1, c),
                cache[:, 0, :, :end],
                cache[:, 1, :, :end],
                attn_mask=mask,
            )
            y[:, first:stop] = part.view(b, groups, per_group, -1, c).permute(0, 3, 1, 2, 4)
        return y

    def _by_row(self, q: Tensor, cache: Tensor, span: Span) -> Tensor:
        """The same, a row at a time with all its queries: the scores stay inside the kernel."""
        b, groups, per_group, n, c = q.shape
        y = q.new_empty(b, n, groups, per_group, c)
        for row in range(b):
            mask = span.sliding(row, q.dtype)
            keys, values = cache[row, :, :, : mask.shape[1]].unsqueeze(2).expand(-1, -1, per_group, -1, -1)
            part = F.scaled_dot_product_attention(q[row].flip(2), keys, values, attn_mask=mask)
            y[row] = part.flip(2).permute(2, 0, 1, 3)
        return y
