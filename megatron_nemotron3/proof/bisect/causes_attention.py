"""Causes in attention layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.bisect.causes import (
    Cause,
    Context,
    Make,
    Steps,
    of_kind,
    shards_of_rows,
    step,
    where,
)

_E4M3 = torch.float8_e4m3fn


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

    return step(attend=lambda plain, q, k, v: plain(rotated(q), rotated(k), v))


@where
def _scaled(context: Context, factor: Callable[[Nemotron3Config], float]) -> Steps | None:
    by = factor(context.config)
    return None if by == 1 else {"attend": lambda plain, q, k, v: plain(q * by, k, v)}


@where
def _interleaved_heads(context: Context) -> Steps:
    """Query head i has the keys of head i modulo the groups; both are given for each query head."""
    heads, groups = context.config.num_attention_heads, context.config.num_query_groups
    taken = torch.arange(heads) % groups * (heads // groups)
    return {"attend": lambda plain, q, k, v: plain(q, k[:, taken], v[:, taken])}


@where
def _masked(context: Context, visible: Callable[[Tensor, Tensor, int], Tensor]) -> Steps:
    """Other visible tokens: of queries [s, 1], keys [1, s] and the prompt's length."""

    def attend(plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = torch.arange(q.shape[-2])
        seen = visible(t[:, None], t[None], context.prompt)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v

    return {"attend": attend}


def of_window(tokens: int) -> Cause:
    """A window of any size."""
    return Cause(f"a window of {tokens} tokens", "*", layer=_window(tokens))


def _window(tokens: int) -> Make:
    return _masked(lambda t, u, p: (u <= t) & (u > t - tokens))


@where
def _qkv(context: Context, places: Callable[[Nemotron3Config], Tensor | None]) -> Steps | None:
    """Other rows of linear_qkv, which has the queries, the key and the value of each group."""
    c, rows = context.config, places(context.config)
    queries = c.num_attention_heads // c.num_query_groups * c.kv_channels

    def linear(plain: Any, x: Tensor, name: str) -> Any:
        if rows is None or not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            return plain(x, name)
        head, part = name[: -len("q_proj.weight")], name[-len("q_proj.weight")]
        qkv = (plain(x, f"{head}{one}_proj.weight").unflatten(-1, (c.num_query_groups, -1)) for one in "qkv")
        taken = torch.cat(list(qkv), -1).flatten(-2)[..., rows].unflatten(-1, (c.num_query_groups, -1))
        split = taken.split([queries, c.kv_channels, c.kv_channels], -1)
        return split["qkv".index(part)].flatten(-2)

    return None if rows is None else {"linear": linear}


def _misread(inverse: bool) -> Make:
    """linear_qkv is grouped and taken for q, k, v; or the reverse."""

    def places(c: Nemotron3Config) -> Tensor:
        """Rows in the order of groups (queries, key, value of each) of a matrix in the order q, k, v."""
        groups, q = c.num_query_groups, c.num_attention_heads
        parts = torch.arange(q + 2 * groups).split([q, groups, groups])
        blocks = torch.cat([part.view(groups, -1) for part in parts], 1).flatten()
        rows = torch.arange(len(blocks) * c.kv_channels).view(-1, c.kv_channels)
        return rows[torch.argsort(blocks) if inverse else blocks].flatten()

    return _qkv(places)


def _other_shards(ranks: int) -> Make:
    """Groups of the ranks in reverse."""

    def places(c: Nemotron3Config) -> Tensor | None:
        rows = torch.arange((c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels)
        return None if c.num_query_groups % ranks else rows.view(ranks, -1).flip(0).flatten()

    return _qkv(places)


def attention_causes() -> Iterator[Cause]:
    """Causes in * layers."""
    found = shards_of_rows("the output projection", "mixer.o_proj.weight") | {
        "rotary positions of base 1e+04 on half of the channels": _rotary(1e4, False, 0.5),
        "scores divided by the head dimension, not by its root": _scaled(lambda c: c.kv_channels**-0.5),
        "scores that are not divided": _scaled(lambda c: c.kv_channels**0.5),
        "scores divided by the root of hidden size over heads": _scaled(
            lambda c: (c.kv_channels * c.num_attention_heads / c.hidden_size) ** 0.5
        ),
        "key heads taken in turn by the query heads": _interleaved_heads(),
        "keys and values swapped": step(attend=lambda plain, q, k, v: plain(q, v, k)),
        "a grouped linear_qkv read as q, k, v": _misread(inverse=False),
        "q, k, v read as a grouped linear_qkv": _misread(inverse=True),
        "no token but the first that sees itself": _masked(lambda t, u, p: (u < t) | (t + u == 0)),
        "no causal mask": _masked(lambda t, u, p: u >= 0 * t),
        "no causal mask in the prompt": _masked(lambda t, u, p: (u <= t) | ((u < p) & (t < p))),
        "keys and values rounded to E4M3": step(
            attend=lambda plain, q, k, v: plain(q, k.to(_E4M3).float(), v.to(_E4M3).float())
        ),
        "tokens that see the next one": _masked(lambda t, u, p: u <= t + 1),
        "no keys of the prompt after it": _masked(lambda t, u, p: (u <= t) & ((u >= p) | (t < p))),
        "the last key of the prompt overwritten": _masked(
            lambda t, u, p: (u <= t) & ((u != p - 1) | (t < p))
        ),
        "no first token": _masked(lambda t, u, p: (u <= t) & ((u > 0) | (t == 0))),
    }
    for base in (1e4, 1e5, 5e5, 1e6, 1e7):
        found[f"rotary positions of base {base:.0e}"] = _rotary(base, pairs=False)
        found[f"rotary positions of base {base:.0e} on neighbouring channels"] = _rotary(base, pairs=True)
    for ranks in (2, 4, 8):
        found[f"the key groups of {ranks} ranks reversed"] = _other_shards(ranks)
    for window in (64, 128, 256, 512, 1024, 2048, 4096):
        found[f"a window of {window} tokens"] = _window(window)
    yield from of_kind("*", found)
