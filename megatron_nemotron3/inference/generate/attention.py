"""Grouped-query attention of new queries over a KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch
from megatron_nemotron3.layers.functional import causal_attention


class KVCache:
    """Keys and values [b, 2, groups, capacity, head dimension]; undefined beyond a row's length."""

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache

    def append(self, kv: Tensor, run: ForwardBatch) -> Tensor:
        """Put kv [b, n, 2, groups, c] after each row's keys and values; the capacity grows by doubling."""
        capacity = self.cache.shape[3]
        if run.end > capacity:
            while capacity < run.end:
                capacity = max(64, 2 * capacity)
            # Masked positions must still be finite: a score of -inf gives weight 0, and 0 * nan is nan.
            self.cache = F.pad(self.cache, (0, 0, 0, capacity - self.cache.shape[3]))
        if run.positions is not None:
            self.cache[run.row_index, :, :, run.positions] = kv
        else:
            self.cache[:, :, :, run.start : run.end] = kv.permute(0, 2, 3, 1, 4)
        return self.cache

    def select(self, rows: list[int]) -> KVCache:
        return KVCache(self.cache[rows])

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


def attend(q: Tensor, cache: Tensor, run: ForwardBatch) -> Tensor:
    """Queries [b, n, groups, heads per group, c] over the keys up to their own -> [b * n, all channels]."""
    if run.n == 1:
        keys, values = cache[:, 0, :, : run.end], cache[:, 1, :, : run.end]
        mask = run.mask((0, 1), run.end, 1, q.dtype)
        return F.scaled_dot_product_attention(q.squeeze(1), keys, values, attn_mask=mask).reshape(run.b, -1)
    q = q.permute(0, 2, 3, 1, 4)
    if q.is_cuda and run.start is not None and q.dtype.itemsize == 2:
        y = by_causal_kernel(q, cache, run)
    elif q.is_cuda or run.mask_fits(q.shape[2]):
        y = by_tile(q, cache, run)
    else:
        y = by_row(q, cache, run)
    return y.reshape(run.b * run.n, -1)


def by_tile(q: Tensor, cache: Tensor, run: ForwardBatch) -> Tensor:
    """All rows at once, as many queries at a time as one mask may have: q [b, groups, per group, n, c]."""
    b, groups, per_group, _, c = q.shape
    parts = []
    for first, stop in run.query_tiles(per_group):
        end = run.end if run.start is None else run.start + stop
        mask = run.mask((first, stop), end, per_group, q.dtype)
        # The queries of a group are concatenated, so that no key is repeated for them.
        queries = q[:, :, :, first:stop].reshape(b, groups, -1, c)
        keys, values = cache[:, 0, :, :end], cache[:, 1, :, :end]
        part = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        parts.append(part.view(b, groups, per_group, -1, c).permute(0, 3, 1, 2, 4))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def by_causal_kernel(q: Tensor, cache: Tensor, run: ForwardBatch) -> Tensor:
    """As `by_tile` for rows of one length: the last query sees every key, and no mask is built."""
    b, groups, per_group, n, c = q.shape
    keys, values = cache[:, 0, :, : run.end], cache[:, 1, :, : run.end]
    y = causal_attention(q.reshape(b, groups * per_group, n, c), keys, values)
    return y.view(b, groups, per_group, n, c).permute(0, 3, 1, 2, 4)


def by_row(q: Tensor, cache: Tensor, run: ForwardBatch) -> Tensor:
    """As `by_tile`, one row at a time with all its queries: the scores stay inside the kernel."""
    b, groups, per_group, n, c = q.shape
    y = q.new_empty(b, n, groups, per_group, c)
    for row in range(b):
        mask = run.reversed_mask(row, q.dtype)
        keys, values = cache[row, :, :, : mask.shape[1]].unsqueeze(2).expand(-1, -1, per_group, -1, -1)
        part = F.scaled_dot_product_attention(q[row].flip(2), keys, values, attn_mask=mask)
        y[row] = part.flip(2).permute(2, 0, 1, 3)
    return y
