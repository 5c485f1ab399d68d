"""Causes in the mixers: Mamba-2 and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.layers.ssd import ssd_step
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON
from megatron_nemotron3.proof.bisect.causes import (
    SHARDS,
    Cause,
    Context,
    Make,
    Steps,
    instead,
    of_kind,
    shard_order,
    shards_of_rows,
    step,
    where,
    windowless,
)
from megatron_nemotron3.proof.bisect.quantities import in_proj_sizes

#: Order of in_proj's parts.
_PARTS = "z", "x", "B", "C", "dt"


def _joined(parts: list[int], ranks: int) -> Tensor:
    """Rows of [part, part, …] in the order of ranks, each with its share of every part."""
    shares = [rows.view(ranks, -1) for rows in torch.arange(sum(parts)).split(parts)]
    return torch.cat(shares, 1).flatten()


def _in_proj(places: Tensor) -> Steps:
    def linear(plain: Any, x: Tensor, name: str) -> Any:
        y = plain(x, name)
        return y[..., places] if name.endswith("mixer.in_proj.weight") else y

    return {"linear": linear}


@where
def _parts_in_order(context: Context, order: list[int]) -> Steps:
    sizes = in_proj_sizes(context.config)
    rows = torch.arange(sum(sizes)).split(sizes)
    return _in_proj(torch.cat([rows[part] for part in order]))


@where
def _part_in_order(context: Context, part: int, ranks: int, order: str) -> Steps | None:
    """The shards of ranks of one part of in_proj in another order."""
    rows = list(torch.arange(sum(in_proj_sizes(context.config))).split(in_proj_sizes(context.config)))
    places = shard_order(len(rows[part]), ranks, order)
    if places is None:
        return None
    rows[part] = rows[part][places]
    return _in_proj(torch.cat(rows))


@where
def _shards(context: Context, ranks: int, names: str) -> Steps | None:
    """Parts of the ranks joined as if the whole were one matrix: of in_proj, conv1d, or both."""
    sizes = in_proj_sizes(context.config)
    if any(n % ranks for n in sizes):
        return None
    steps = dict(_in_proj(_joined(sizes, ranks))) if "in_proj" in names else {}
    if "conv1d" in names:
        channels = _joined(sizes[1:4], ranks)
        steps["conv"] = lambda plain, x, taps, bias: plain(x, taps[channels], bias[channels])
    return steps


@where
def _conv_state(context: Context, shift: int | None) -> Steps | None:
    """What decoding finds of the prompt in the convolution's state: moved by tokens, or nothing (None)."""
    p = context.prompt

    def conv(plain: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = plain(x, taps, bias)
        if p < x.shape[1]:
            state = torch.zeros_like(x[:, :p])
            if shift is not None and shift > 0:
                state[:, shift:] = x[:, : p - shift]
            elif shift is not None:
                state[:, : p + shift] = x[:, -shift:p]
            y = torch.cat([y[:, :p], plain(torch.cat([state, x[:, p:]], 1), taps, bias)[:, p:]], 1)
        return y

    return {"conv": windowless(conv)} if p else None


@where
def _state_lost(context: Context, at_chunks: bool) -> Steps | None:
    """The state does not pass a border: the prompt's end, or that of each chunk."""
    size = context.config.mamba_chunk_size
    if not (at_chunks or context.prompt):
        return None
    return cut_scan(lambda tokens: range(size, tokens, size) if at_chunks else [context.prompt])


def cut_scan(borders: Callable[[int], Iterable[int]]) -> Steps:
    """The scan begins anew at borders, of a number of tokens."""

    def scan(plain: Any, *given: Tensor) -> Any:
        x, dt, A, B, C, ssm = given
        s, outputs = x.shape[1], []
        edges = [0, *(b for b in borders(s) if 0 < b < s), s]
        for i, j in zip(edges, edges[1:]):
            y, ssm = plain(x[:, i:j], dt[:, i:j], A, B[:, i:j], C[:, i:j], torch.zeros_like(ssm))
            outputs.append(y)
        return torch.cat(outputs, 1), ssm

    return {"scan": scan}


@where
def _state_rounded(
    context: Context, dtype: torch.dtype, after_prompt: bool, output: bool = False
) -> Steps | None:
    """The state is stored in another type after every token; `output`: and the output read from there."""
    p = context.prompt if after_prompt else 0

    def scan(plain: Any, *given: Tensor) -> Any:
        x, dt, A, B, C, ssm = given
        outputs = []
        if p:
            y, ssm = plain(x[:, :p], dt[:, :p], A, B[:, :p], C[:, :p], ssm)
            outputs.append(y)
        for t in range(p, x.shape[1]):
            y, ssm = ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], None, ssm.to(dtype).float())
            if output:
                lost = ssm.to(dtype).float() - ssm
                y = y + (lost * C[:, t].repeat_interleave(x.shape[2] // C.shape[2], 1)[:, :, None]).sum(-1)
            outputs.append(y.unsqueeze(1))
        return torch.cat(outputs, 1), ssm

    return {"scan": scan} if context.prompt or not after_prompt else None


def _of_A(change: Callable[[Tensor], Tensor]) -> Make:
    return step(scan=lambda plain, x, dt, A, B, C, ssm: plain(x, dt, change(A), B, C, ssm))


def _of_D(change: Callable[[Tensor], Tensor]) -> Make:
    def weight(plain: Any, name: str) -> Any:
        return change(plain(name)) if name.endswith("mixer.D") else plain(name)

    return step(weight=weight)


def _gated(plain: Any, y: Tensor, z: Tensor, gain: Tensor, groups: int, eps: float) -> Any:
    """Another epsilon in the norm after the scan."""
    return plain.__self__.rms((y * F.silu(z)).unflatten(-1, (groups, -1)), eps).flatten(-2) * gain


def _ungated(plain: Any, y: Tensor, z: Tensor, gain: Tensor, groups: int) -> Any:
    """The norm after the scan alone."""
    normed = plain.__self__.rms(y.unflatten(-1, (groups, -1)), GATED_NORM_EPSILON)
    return normed.flatten(-2) * gain


@where
def _interleaved_groups(context: Context) -> Steps:
    """Head i has B and C of group i modulo the groups."""
    taken = torch.arange(context.config.mamba_num_heads) % context.config.mamba_num_groups
    return {"scan": lambda plain, x, dt, A, B, C, ssm: plain(x, dt, A, B[:, :, taken], C[:, :, taken], ssm)}


def _taps(change: Callable[[Tensor], Tensor]) -> Make:
    return step(conv=lambda plain, x, taps, bias: plain(x, change(taps), bias))


def _unactivated(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), taps, bias, groups=len(taps)).transpose(1, 2)


def _clamped(low: float, high: float | None, dt: Tensor, bias: Tensor) -> Tensor:
    return F.softplus(dt + bias).clamp(low, high)


def mamba_causes() -> Iterator[Cause]:
    """Causes in M layers."""
    rounded = {
        f"the SSM state in {word} {when}": _state_rounded(dtype, after)
        for dtype, word in ((torch.bfloat16, "BF16"), (torch.float16, "FP16"))
        for when, after in (("while decoding", True), ("at every token", False))
    }
    rounded |= {
        f"the SSM state in BF16 {when}, and outputs from there": _state_rounded(torch.bfloat16, after, True)
        for when, after in (("while decoding", True), ("at every token", False))
    }
    yield from of_kind("M", rounded, rounds=True)
    found = shards_of_rows("out_proj", "mixer.out_proj.weight") | {
        "a convolution state one token late after the prompt": _conv_state(1),
        "a convolution state one token early after the prompt": _conv_state(-1),
        "a convolution state empty after the prompt": _conv_state(None),
        "an SSM state that is empty after the prompt": _state_lost(False),
        "no SSM state from one chunk to the next": _state_lost(True),
        "a convolution one token late": step(
            conv=windowless(lambda f, x, w, b: f(F.pad(x, (0, 0, 1, 0))[:, :-1], w, b))
        ),
        "B and C of the scan in each other's place": step(
            scan=lambda plain, x, dt, A, B, C, ssm: plain(x, dt, A, C, B, ssm)
        ),
        "A_log instead of A": _of_A(lambda A: (-A).log()),
        "A rounded to BF16": _of_A(lambda A: A.bfloat16().float()),
        "no bias of the convolution": step(conv=lambda f, x, w, b: f(x, w, torch.zeros_like(b))),
        "the convolution's taps in reverse": _taps(lambda w: w.flip(-1)),
        "the convolution's weight read tap by tap, not channel by channel": _taps(
            lambda w: w.reshape(w.shape[-1], -1).t().reshape(w.shape)
        ),
        "the convolution's weight read channel by channel, not tap by tap": _taps(
            lambda w: w.flatten(1).t().reshape(w.shape)
        ),
        "no SiLU after the convolution": instead(conv=_unactivated),
        "dt first in in_proj": _parts_in_order([4, 0, 1, 2, 3]),
        "one norm over all groups after the scan": step(gated_norm=lambda f, y, z, g, n: f(y, z, g, 1)),
        "the norm before the gate": step(gated_norm=lambda *given: _ungated(*given) * F.silu(given[2])),
        "no gate": step(gated_norm=_ungated),
        "no norm after the scan": instead(gated_norm=lambda y, z, g, n: y * F.silu(z)),
        "no gain in the norm after the scan": step(
            gated_norm=lambda f, y, z, g, n: f(y, z, torch.ones_like(g), n)
        ),
        "no D": _of_D(torch.zeros_like),
        "D of 1": _of_D(torch.ones_like),
        "A_log instead of its exponential": _of_A(lambda A: -(-A).log().abs()),
        "A of the negative A_log": _of_A(torch.reciprocal),
        "A of 1": _of_A(lambda A: -torch.ones_like(A)),
        "heads in other groups of B and C": _interleaved_groups(),
        "no dt_bias": instead(time_steps=lambda dt, bias: F.softplus(dt)),
        "dt_bias added after softplus": instead(time_steps=lambda dt, bias: F.softplus(dt) + bias),
        "no softplus of the time steps": instead(time_steps=lambda dt, bias: dt + bias),
        "a limit at 0 instead of softplus": instead(time_steps=lambda dt, bias: F.relu(dt + bias)),
        "softplus twice": instead(time_steps=lambda dt, bias: F.softplus(F.softplus(dt + bias))),
    }
    for pair in combinations(range(4), 2):
        order = [pair[1 - pair.index(n)] if n in pair else n for n in range(5)]
        names = " and ".join(_PARTS[n] for n in pair)
        found[f"{names} of in_proj in each other's place"] = _parts_in_order(order)
    for ranks in (2, 4, 8):
        for names in ("in_proj", "conv1d", "in_proj and conv1d"):
            what = f"the shards of {ranks} ranks of {names} joined without sorting z, x, B, C and dt"
            found[what] = _shards(ranks, names)
    for eps in (1e-6, 1e-8):
        found[f"epsilon {eps:.0e} in the norm after the scan"] = step(gated_norm=partial(_gated, eps=eps))
    for low, high in ((1e-3, None), (1e-3, 1e-1), (1e-4, None), (0.0, 1e-1)):
        limits = f"[{low:g}, {'infinite' if high is None else f'{high:g}'}]"
        found[f"time steps limited to {limits}"] = instead(time_steps=partial(_clamped, low, high))
    yield from of_kind("M", found)
    parts = {
        f"the shards of {ranks} ranks of {name} in in_proj {order_}": _part_in_order(part, ranks, order_)
        for part, name in enumerate(_PARTS)
        for ranks, order_ in SHARDS
    }
    yield from of_kind("M", parts, located=True)


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
