"""What the layer kinds share, grouped-query attention, and the dense MLP.

Activations are [tokens, d], the tokens of all rows concatenated, in the dtype of the weights. A layer returns
the residual stream after it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch
from megatron_nemotron3.inference.generate.linear import DecodeLinear
from megatron_nemotron3.inference.generate.state import KVCache, LayerState, MambaPass
from megatron_nemotron3.models import Nemotron3Config


class ReadTensor(Protocol):
    """Reads a tensor by its Hugging Face name below the layer."""

    def __call__(self, name: str, *shape: int, float32: bool = False) -> Tensor: ...


class DecodeLayer(Protocol):
    """A layer of a stack."""

    def new_state(self, batch: int, capacity: int) -> LayerState: ...

    def __call__(self, x: Tensor, state: LayerState, batch: ForwardBatch) -> tuple[Tensor, MambaPass | None]:
        """Return the stream after the layer for x [tokens, d], and the scan of a Mamba-2 layer, if any."""
        ...


class GroupNorm:
    """RMSNorm over groups of channels in few operations; statistics are FP32, the result has x's dtype.

    x / sqrt(mean(x^2) + eps) = x / sqrt(|x|^2 + n eps) * sqrt(n): one norm, one hypot, one division.

    weight: [d].
    """

    def __init__(self, weight: Tensor, eps: float, groups: int = 1) -> None:
        n = len(weight) // groups
        self.dtype, self.groups = weight.dtype, groups
        self.weight = weight.float() * n**0.5
        self.eps = torch.tensor((n * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float() if self.groups == 1 else x.float().view(len(x), self.groups, -1)
        length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(self.eps)
        y = torch.div(wide, length)
        y = y if self.groups == 1 else y.view(x.shape)
        return y.mul_(self.weight).to(self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.weight.device)


def read_norm(read: ReadTensor, config: Nemotron3Config, name: str = "norm.weight") -> GroupNorm:
    """The norm with the weight of that name."""
    return GroupNorm(read(name, config.hidden_size), config.layernorm_epsilon)


class MLP:
    """Layer kind -: x + W2 relu(W1 norm(x))^2."""

    def __init__(self, read: ReadTensor, config: Nemotron3Config) -> None:
        d, width = config.hidden_size, config.dense_ffn_hidden_size
        assert width is not None
        self.norm = read_norm(read, config)
        self.up = DecodeLinear(read("mixer.up_proj.weight", width, d))
        self.down = DecodeLinear(read("mixer.down_proj.weight", d, width))

    def new_state(self, batch: int, capacity: int) -> None:
        """This kind has no state."""

    def __call__(self, x: Tensor, state: LayerState, batch: ForwardBatch) -> tuple[Tensor, None]:
        hidden = self.up(self.norm(x)).relu_()
        return self.down(hidden.mul_(hidden), add=x), None


class Attention:
    """Layer kind *: grouped-query attention without positional encoding, over a KV cache."""

    def __init__(self, read: ReadTensor, config: Nemotron3Config) -> None:
        c, d = config, config.hidden_size
        self.heads, self.groups, self.head_dim = c.num_attention_heads, c.num_query_groups, c.kv_channels
        q, kv = self.heads * self.head_dim, self.groups * self.head_dim
        self.norm = read_norm(read, config)
        parts = (("q", q), ("k", kv), ("v", kv))
        weights = [read(f"mixer.{name}_proj.weight", rows, d) for name, rows in parts]
        self.qkv = DecodeLinear(torch.cat(weights))
        self.out = DecodeLinear(read("mixer.o_proj.weight", d, q))

    def new_state(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.norm.zeros(batch, 2, self.groups, capacity, self.head_dim))

    def __call__(self, x: Tensor, state: LayerState, batch: ForwardBatch) -> tuple[Tensor, None]:
        assert isinstance(state, KVCache)
        b, n, groups, c = batch.b, batch.n, self.groups, self.head_dim
        per_group = self.heads // groups
        qkv = self.qkv(self.norm(x)).view(b, n, self.heads + 2 * groups, c)
        cache = state.reserve(batch.end)
        kv = qkv[:, :, self.heads :].view(b, n, 2, groups, c)
        if batch.positions is not None:
            cache[batch.row_index, :, :, batch.positions] = kv
        else:
            cache[:, :, :, batch.start : batch.end] = kv.permute(0, 2, 3, 1, 4)
        q = qkv[:, :, : self.heads].view(b, n, groups, per_group, c).permute(0, 2, 3, 1, 4)
        if n == 1:
            keys, values = cache[:, 0, :, : batch.end], cache[:, 1, :, : batch.end]
            mask = batch.mask((0, 1), batch.end, 1, q.dtype)
            y = F.scaled_dot_product_attention(q.squeeze(3), keys, values, attn_mask=mask)
            return self.out(y.reshape(b, -1), add=x), None
        fits = batch.mask_fits(per_group)
        if not fits and x.is_cuda and batch.start is not None and x.dtype.itemsize == 2:
            y = self._by_causal_kernel(q, cache, batch)
        elif fits or x.device.type != "cpu":
            y = self._by_tile(q, cache, batch)
        else:
            y = self._by_row(q, cache, batch)
        return self.out(y.reshape(b * n, -1), add=x), None

    def _by_tile(self, q: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """All rows at once, as many queries at a time as one mask may have."""
        b, groups, per_group, n, c = q.shape
        parts = []
        for first, stop in batch.query_tiles(per_group):
            end = batch.end if batch.start is None else batch.start + stop
            mask = batch.mask((first, stop), end, per_group, q.dtype)
            # The queries of a group are concatenated, so that no key is repeated for them.
            part = F.scaled_dot_product_attention(
                q[:, :, :, first:stop].reshape(b, groups, -1, c),
                cache[:, 0, :, :end],
                cache[:, 1, :, :end],
                attn_mask=mask,
            )
            parts.append(part.view(b, groups, per_group, -1, c).permute(0, 3, 1, 2, 4))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _by_causal_kernel(self, q: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """As `_by_tile` for rows of one length: the last query sees every key, and no mask is built."""
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: a second

        b, groups, per_group, n, c = q.shape
        y = F.scaled_dot_product_attention(
            q.reshape(b, groups * per_group, n, c),
            cache[:, 0, :, : batch.end],
            cache[:, 1, :, : batch.end],
            attn_mask=causal_lower_right(n, batch.end),
            enable_gqa=True,
        )
        return y.view(b, groups, per_group, n, c).permute(0, 3, 1, 2, 4)

    def _by_row(self, q: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """As `_by_tile`, one row at a time with all its queries: the scores stay inside the kernel."""
        b, groups, per_group, n, c = q.shape
        y = q.new_empty(b, n, groups, per_group, c)
        for row in range(b):
            mask = batch.reversed_mask(row, q.dtype)
            keys, values = cache[row, :, :, : mask.shape[1]].unsqueeze(2).expand(-1, -1, per_group, -1, -1)
            part = F.scaled_dot_product_attention(q[row].flip(2), keys, values, attn_mask=mask)
            y[row] = part.flip(2).permute(2, 0, 1, 3)
        return y
