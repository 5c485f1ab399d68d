"""Causes in attention layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.bisect.causes import SHARDS, Cause, Context, Make, columns_in_order, step
from megatron_nemotron3.bisect.recompute import Change
from megatron_nemotron3.models import Nemotron3Config


def _rotary(base: float, pairs: bool, share: float = 1.0) -> Make:
    """Rotary positions; `pairs`: neighbouring channels are rotated, not halves; `share` of the channels."""

    def rotated(x: Tensor) -> Tensor:
        width = int(x.shape[-1] * share)
        turned, rest = x[..., :width], x[..., width:]
        angle = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(0, width, 2) / width)
        cos, sin = angle.cos(), angle.sin()
        a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
        new = a * cos - b * sin, b * cos + a * sin
        return torch.cat([torch.stack(new, -1).flatten(-2) if pairs else torch.cat(new, -1), rest], -1)

    return step(positions=lambda plain, q, k: (rotated(q), rotated(k)))


def _scaled(factor: Callable[[Nemotron3Config], float]) -> Make:
    """Scores times a factor."""

    def make(context: Context) -> Change | None:
        by = factor(context.config)
        return None if by == 1 else Change(steps={"positions": lambda plain, q, k: (q * by, k)})

    return make


def _in_turn(plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Query head i has the keys of head i modulo the groups: [rows, groups, heads, s, c]."""
    groups, heads = q.shape[1:3]
    taken = (torch.arange(groups * heads) % groups).view(groups, heads)
    return plain(q, k[:, taken, 0], v[:, taken, 0])


def _masked(visible: Callable[[Tensor, Tensor, int], Tensor]) -> Make:
    """Other visible tokens: of queries [s, 1], keys [1, s] and the prompt's length."""

    def make(context: Context) -> Change | None:
        def attend(plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            t = torch.arange(q.shape[-2])
            seen = visible(t[:, None], t[None], context.prompt)
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v

        return Change(steps={"attend": attend})

    return make


def _grouped(c: Nemotron3Config, inverse: bool) -> Tensor:
    """Rows in the order of groups (queries, key, value of each) of a matrix in the order q, k, v."""
    groups, heads = c.num_query_groups, c.num_attention_heads // c.num_query_groups
    q = groups * heads
    order = [b for g in range(groups) for b in (*range(g * heads, (g + 1) * heads), q + g, q + groups + g)]
    blocks = torch.tensor(order)
    rows = torch.arange(len(order) * c.kv_channels).view(-1, c.kv_channels)
    return rows[torch.argsort(blocks) if inverse else blocks].flatten()


def _qkv(places: Callable[[Nemotron3Config], Tensor | None]) -> Make:
    """Rows of linear_qkv in another order."""

    def make(context: Context) -> Change | None:
        rows = places(context.config)
        if rows is None:
            return None

        def linear(plain: Any, x: Tensor, name: str, count: int) -> Any:
            y = plain(x, name, count)
            return y[..., rows] if name.endswith("linear_qkv.weight") else y

        return Change(steps={"linear": linear})

    return make


def _misread(inverse: bool) -> Make:
    """linear_qkv is grouped and taken for q, k, v; or the reverse.

    Reading rows in the order r where they lie in the order g is the order r[g⁻¹]; the plain order is grouped.
    """
    return _qkv(lambda c: _grouped(c, inverse))


def _other_shards(ranks: int) -> Make:
    """Groups of the ranks in reverse."""

    def places(c: Nemotron3Config) -> Tensor | None:
        if c.num_query_groups % ranks:
            return None
        per = (c.num_attention_heads // c.num_query_groups + 2) * c.kv_channels
        return torch.arange(c.num_query_groups * per).view(ranks, -1).flip(0).flatten()

    return _qkv(places)


def attention_causes() -> Iterator[Cause]:
    """Causes in * layers."""

    def cause(name: str, make: Make) -> Cause:
        return Cause(name, "*", layer=make)

    for base in (1e4, 1e5, 5e5, 1e6, 1e7):
        yield cause(f"rotary positions of base {base:.0e}", _rotary(base, pairs=False))
        yield cause(
            f"rotary positions of base {base:.0e} on neighbouring channels", _rotary(base, pairs=True)
        )
    yield cause("rotary positions of base 1e+04 on half of the channels", _rotary(1e4, False, 0.5))
    yield cause(
        "scores divided by the head dimension, not by its root", _scaled(lambda c: c.kv_channels**-0.5)
    )
    yield cause("scores that are not divided", _scaled(lambda c: c.kv_channels**0.5))
    by_hidden = _scaled(lambda c: (c.kv_channels * c.num_attention_heads / c.hidden_size) ** 0.5)
    yield cause("scores divided by the root of hidden size over heads", by_hidden)
    yield cause("key heads taken in turn by the query heads", step(attend=_in_turn))
    yield cause("keys and values swapped", step(attend=lambda plain, q, k, v: plain(q, v, k)))
    yield cause("a grouped linear_qkv read as q, k, v", _misread(inverse=False))
    yield cause("q, k, v read as a grouped linear_qkv", _misread(inverse=True))
    for ranks in (2, 4, 8):
        yield cause(f"the key groups of {ranks} ranks reversed", _other_shards(ranks))
    for ranks, order in SHARDS:
        name, width = "self_attention.linear_proj.weight", lambda c: c.num_attention_heads * c.kv_channels
        make = columns_in_order(name, width, ranks, order)
        yield cause(f"the shards of {ranks} ranks of the output projection {order}", make)
    itself = _masked(lambda t, u, p: (u < t) | (t + u == 0))
    yield cause("no token but the first that sees itself", itself)
    yield cause("no causal mask", _masked(lambda t, u, p: u >= 0 * t))
    yield cause("tokens that see the next one", _masked(lambda t, u, p: u <= t + 1))
    for window in (64, 128, 256, 512, 1024, 2048, 4096):
        sliding = _masked(lambda t, u, p, w=window: (u <= t) & (u > t - w))  # type: ignore[misc]
        yield cause(f"a window of {window} tokens", sliding)
    lost = _masked(lambda t, u, p: (u <= t) & ((u >= p) | (t < p)))
    yield cause("no keys of the prompt after it", lost)
    overwritten = _masked(lambda t, u, p: (u <= t) & ((u != p - 1) | (t < p)))
    yield cause("the last key of the prompt overwritten", overwritten)
    first = _masked(lambda t, u, p: (u <= t) & ((u > 0) | (t == 0)))
    yield cause("no first token", first)
