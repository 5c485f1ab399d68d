"""Causes in Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.bisect.causes import SHARDS, Cause, Context, Make, columns_in_order, step
from megatron_nemotron3.bisect.recompute import Change
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.functional import gated_group_rms_norm, rms_norm
from megatron_nemotron3.layers.ssd import ssd_chunked, ssd_step
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON

#: Order of in_proj's parts.
_PARTS = "z", "x", "B", "C", "dt"


def _sizes(c: Nemotron3Config) -> list[int]:
    bc = c.mamba_num_groups * c.mamba_state_dim
    return [c.mamba_inner_size, c.mamba_inner_size, bc, bc, c.mamba_num_heads]


def _joined(parts: list[int], ranks: int) -> Tensor | None:
    """Rows of [part, part, …] in the order of ranks, each with its share of every part; None if uneven."""
    if any(n % ranks for n in parts):
        return None
    starts = [sum(parts[:i]) for i in range(len(parts))]
    rows = [
        torch.arange(start + rank * n // ranks, start + (rank + 1) * n // ranks)
        for rank in range(ranks)
        for start, n in zip(starts, parts, strict=True)
    ]
    return torch.cat(rows)


def _in_proj(places: Tensor) -> Callable[..., Any]:
    return lambda plain, name, x, parts: plain(name, x, parts)[..., places]


def _parts_in_order(order: tuple[int, ...]) -> Make:
    def make(context: Context) -> Change | None:
        sizes = _sizes(context.config)
        rows = torch.arange(sum(sizes)).split(sizes)
        return Change(steps={"in_proj": _in_proj(torch.cat([rows[part] for part in order]))})

    return make


def _shards(ranks: int, *, projection: bool, convolution: bool) -> Make:
    """Parts of the ranks joined as if the whole were one matrix."""

    def make(context: Context) -> Change | None:
        sizes, steps = _sizes(context.config), {}
        rows, channels = _joined(sizes, ranks), _joined(sizes[1:4], ranks)
        if rows is None or channels is None:
            return None
        if projection:
            steps["in_proj"] = _in_proj(rows)
        if convolution:
            steps["conv"] = lambda plain, x, taps, bias: plain(x, taps[channels], bias[channels])
        return Change(steps=steps)

    return make


def _conv_state(shift: int | None) -> Make:
    """What decoding finds of the prompt in the convolution's state: moved by tokens, or nothing (None)."""

    def make(context: Context) -> Change | None:
        p = context.prompt

        def conv(plain: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
            y: Tensor = plain(x, taps, bias)
            if 0 < p < x.shape[1]:
                state = torch.zeros_like(x[:, :p])
                if shift is not None and shift > 0:
                    state[:, shift:] = x[:, : p - shift]
                elif shift is not None:
                    state[:, : p + shift] = x[:, -shift:p]
                y = torch.cat([y[:, :p], plain(torch.cat([state, x[:, p:]], 1), taps, bias)[:, p:]], 1)
            return y

        return Change(steps={"conv": conv}) if p else None

    return make


def _state_lost(at_chunks: bool) -> Make:
    """The state does not pass a border: the prompt's end, or that of each chunk."""

    def make(context: Context) -> Change | None:
        def scan(plain: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
            s, size = x.shape[1], context.config.mamba_chunk_size
            borders = [*range(size, s, size)] if at_chunks else [context.prompt]
            edges = [0, *(b for b in borders if 0 < b < s), s]
            pieces = zip(edges, edges[1:])
            return torch.cat([plain(x[:, i:j], dt[:, i:j], A, B[:, i:j], C[:, i:j], D) for i, j in pieces], 1)

        return Change(steps={"scan": scan}) if at_chunks or context.prompt else None

    return make


def _state_rounded(dtype: torch.dtype, after_prompt: bool) -> Make:
    """The state is stored in another type after every token."""

    def make(context: Context) -> Change | None:
        p = context.prompt if after_prompt else 0

        def scan(plain: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
            if p >= x.shape[1]:
                return plain(x, dt, A, B, C, D)
            state, outputs = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]), []
            if p:
                before = x[:, :p], dt[:, :p], A, B[:, :p], C[:, :p]
                y, state = ssd_chunked(*before, D=D, return_final_state=True)
                outputs.append(y)
            for t in range(p, x.shape[1]):
                y, state = ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], D, state.to(dtype).float())
                outputs.append(y.unsqueeze(1))
            return torch.cat(outputs, 1)

        return Change(steps={"scan": scan}) if context.prompt or not after_prompt else None

    return make


def _operands(change: Callable[..., tuple[Tensor, ...]]) -> Make:
    """Other x, dt, A, B, C, D of the scan."""
    return step(scan=lambda plain, *operands: plain(*change(*operands)))


def _steps(change: Callable[[Tensor, Tensor], Tensor]) -> Make:
    """Other time steps from dt and its bias."""
    return step(time_steps=lambda plain, dt, bias: change(dt, bias))


def _gated(change: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Make:
    """Another norm of the scan's output y, with the gate z, a gain, and groups of a size."""
    return step(gated_norm=lambda plain, y, z, gain, group: change(y, z, gain, group))


def _normed(y: Tensor, gain: Tensor, group: int) -> Tensor:
    ones = torch.ones(group)
    return rms_norm(y.unflatten(-1, (-1, group)), ones, GATED_NORM_EPSILON).flatten(-2) * gain


def _other_groups(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, ...]:
    """Head i has B and C of group i modulo the groups."""
    taken = torch.arange(x.shape[2]) % B.shape[2]
    return x, dt, A, B[:, :, taken], C[:, :, taken], D


def mamba_causes() -> Iterator[Cause]:
    """Causes in M layers."""

    def cause(name: str, make: Make, rounds: bool = False) -> Cause:
        return Cause(name, "M", layer=make, rounds=rounds)

    for shift, words in ((1, "one token late"), (-1, "one token early"), (None, "empty")):
        yield cause(f"a convolution state {words} after the prompt", _conv_state(shift))
    yield cause("an SSM state that is empty after the prompt", _state_lost(at_chunks=False))
    yield cause("no SSM state from one chunk to the next", _state_lost(at_chunks=True))
    for dtype, word in ((torch.bfloat16, "BF16"), (torch.float16, "FP16")):
        yield cause(f"the SSM state in {word} while decoding", _state_rounded(dtype, True), True)
        yield cause(f"the SSM state in {word} at every token", _state_rounded(dtype, False), True)
    yield cause("no bias of the convolution", step(conv=lambda f, x, w, b: f(x, w, torch.zeros_like(b))))
    yield cause("the convolution's taps in reverse", step(conv=lambda f, x, w, b: f(x, w.flip(-1), b)))
    transposed = step(conv=lambda f, x, w, b: f(x, w.reshape(w.shape[-1], -1).t().reshape(w.shape), b))
    yield cause("the convolution's weight read tap by tap, not channel by channel", transposed)
    other = step(conv=lambda f, x, w, b: f(x, w.flatten(1).t().reshape(w.shape), b))
    yield cause("the convolution's weight read channel by channel, not tap by tap", other)
    silent = step(conv=lambda f, x, w, b: causal_conv1d(x, w, b, activation=None))
    yield cause("no SiLU after the convolution", silent)
    for first in range(4):
        for second in range(first + 1, 5):
            order = [*range(5)]
            order[first], order[second] = order[second], order[first]
            if second < 4:
                names = f"{_PARTS[first]} and {_PARTS[second]}"
                yield cause(f"{names} of in_proj in each other's place", _parts_in_order(tuple(order)))
    yield cause("dt first in in_proj", _parts_in_order((4, 0, 1, 2, 3)))
    for ranks in (2, 4, 8):
        ordered = f"the shards of {ranks} ranks"
        how = "joined without sorting z, x, B, C and dt"
        yield cause(f"{ordered} of in_proj {how}", _shards(ranks, projection=True, convolution=False))
        yield cause(f"{ordered} of conv1d {how}", _shards(ranks, projection=False, convolution=True))
        yield cause(
            f"{ordered} of in_proj and conv1d {how}", _shards(ranks, projection=True, convolution=True)
        )
    for ranks, order_ in SHARDS:
        make = columns_in_order("mixer.out_proj.weight", lambda c: c.mamba_inner_size, ranks, order_)
        yield cause(f"the shards of {ranks} ranks of out_proj {order_}", make)
    whole = _gated(
        lambda y, z, g, n: gated_group_rms_norm(y, z, g, group_size=y.shape[-1], eps=GATED_NORM_EPSILON)
    )
    yield cause("one norm over all groups after the scan", whole)
    yield cause("the norm before the gate", _gated(lambda y, z, g, n: _normed(y, g, n) * F.silu(z)))
    yield cause("no gate", _gated(lambda y, z, g, n: _normed(y, g, n)))
    yield cause("no norm after the scan", _gated(lambda y, z, g, n: y * F.silu(z)))
    ungained = step(gated_norm=lambda f, y, z, g, n: f(y, z, torch.ones_like(g), n))
    yield cause("no gain in the norm after the scan", ungained)
    for eps in (1e-6, 1e-8):
        change = _gated(lambda y, z, g, n, e=eps: gated_group_rms_norm(y, z, g, group_size=n, eps=e))  # type: ignore[misc]
        yield cause(f"epsilon {eps:.0e} in the norm after the scan", change)
    yield cause("no D", _operands(lambda x, dt, A, B, C, D: (x, dt, A, B, C, torch.zeros_like(D))))
    yield cause("D of 1", _operands(lambda x, dt, A, B, C, D: (x, dt, A, B, C, torch.ones_like(D))))
    logarithm = _operands(lambda x, dt, A, B, C, D: (x, dt, -(-A).log().abs(), B, C, D))
    yield cause("A_log instead of its exponential", logarithm)
    minus = _operands(lambda x, dt, A, B, C, D: (x, dt, 1 / A, B, C, D))
    yield cause("A of the negative A_log", minus)
    yield cause("A of 1", _operands(lambda x, dt, A, B, C, D: (x, dt, -torch.ones_like(A), B, C, D)))
    yield cause("heads in other groups of B and C", _operands(_other_groups))
    yield cause("no dt_bias", _steps(lambda dt, bias: F.softplus(dt)))
    yield cause("dt_bias added after softplus", _steps(lambda dt, bias: F.softplus(dt) + bias))
    yield cause("no softplus of the time steps", _steps(lambda dt, bias: dt + bias))
    yield cause("a limit at 0 instead of softplus", _steps(lambda dt, bias: F.relu(dt + bias)))
    yield cause("softplus twice", _steps(lambda dt, bias: F.softplus(F.softplus(dt + bias))))
    for low, high in ((1e-3, None), (1e-3, 1e-1), (1e-4, None), (0.0, 1e-1)):
        limits = f"[{low:g}, {'infinite' if high is None else f'{high:g}'}]"
        clamped = _steps(lambda dt, bias, low=low, high=high: F.softplus(dt + bias).clamp(low, high))  # type: ignore[misc]
        yield cause(f"time steps limited to {limits}", clamped)
