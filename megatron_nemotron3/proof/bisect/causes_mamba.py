"""Causes in Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    instead,
    of_kind,
    shard_order,
    shards_of_rows,
    step,
    where,
    windowless,
)
from megatron_nemotron3.proof.bisect.recompute import Steps

#: Order of in_proj's parts.
_PARTS = "z", "x", "B", "C", "dt"


def _sizes(c: Nemotron3Config) -> list[int]:
    bc = c.mamba_num_groups * c.mamba_state_dim
    return [c.mamba_inner_size, c.mamba_inner_size, bc, bc, c.mamba_num_heads]


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
    sizes = _sizes(context.config)
    rows = torch.arange(sum(sizes)).split(sizes)
    return _in_proj(torch.cat([rows[part] for part in order]))


@where
def _part_in_order(context: Context, part: int, ranks: int, order: str) -> Steps | None:
    """The shards of ranks of one part of in_proj in another order."""
    rows = list(torch.arange(sum(_sizes(context.config))).split(_sizes(context.config)))
    places = shard_order(len(rows[part]), ranks, order)
    if places is None:
        return None
    rows[part] = rows[part][places]
    return _in_proj(torch.cat(rows))


@where
def _shards(context: Context, ranks: int, names: str) -> Steps | None:
    """Parts of the ranks joined as if the whole were one matrix: of in_proj, conv1d, or both."""
    sizes = _sizes(context.config)
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

    def scan(plain: Any, *given: Tensor) -> Any:
        x, dt, A, B, C, ssm = given
        s, size, outputs = x.shape[1], context.config.mamba_chunk_size, []
        borders = [*range(size, s, size)] if at_chunks else [context.prompt]
        edges = [0, *(b for b in borders if 0 < b < s), s]
        for i, j in zip(edges, edges[1:]):
            y, ssm = plain(x[:, i:j], dt[:, i:j], A, B[:, i:j], C[:, i:j], torch.zeros_like(ssm))
            outputs.append(y)
        return torch.cat(outputs, 1), ssm

    return {"scan": scan} if at_chunks or context.prompt else None


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
