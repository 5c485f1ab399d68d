"""Changes of what a layer computes on its way: a cause for each quantity and each change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.precision.quantizer import Spec, fake_quantize
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause, Context, Make, step, windowless
from megatron_nemotron3.proof.bisect.causes_mixers import cut_scan
from megatron_nemotron3.proof.bisect.quantities import (
    MATRICES,
    QUANTITIES,
    Change,
    ChangeAt,
    of_other_layer,
)


def _int8(t: Tensor) -> Tensor:
    """Rounded to 8 bits with one scale."""
    scale = t.abs().amax().clamp_min(1e-30) / 127
    return (t / scale).round() * scale


def _nvfp4(t: Tensor) -> Tensor:
    """Rounded to NVFP4: blocks of 16 along the last axis."""
    if t.dim() < 2 or t.shape[-1] % 16:
        return t
    return fake_quantize(t.flatten(0, -2).contiguous(), Spec()).view_as(t)


def _first_shard(ranks: int, t: Tensor) -> Tensor:
    """Each of the ranks has the shard of the first."""
    if t.shape[-1] % ranks:
        return t
    return t.unflatten(-1, (ranks, -1))[..., :1, :].expand(*t.shape[:-1], ranks, -1).flatten(-2)


def _neighbours(t: Tensor) -> Tensor:
    even = t.shape[-1] // 2 * 2
    return torch.cat([t[..., :even].unflatten(-1, (-1, 2)).flip(-1).flatten(-2), t[..., even:]], -1)


#: Of any quantity.
_PLAIN: dict[str, Change] = {
    "no {}": torch.zeros_like,
    "twice {}": lambda t: 2 * t,
    "half of {}": lambda t: t / 2,
    "the negative of {}": torch.neg,
    "{} plus one": lambda t: t + 1,
    "{} squared": torch.square,
    "{} in reverse order": lambda t: t.flip(-1),
    "the two halves of {} swapped": lambda t: t.roll(t.shape[-1] // 2, -1),
    "neighbouring channels of {} swapped": _neighbours,
    **{f"the first of {n} shards of {{}} in place of each": partial(_first_shard, n) for n in (2, 4, 8)},
    "{} without its mean": lambda t: t - t.mean(-1, keepdim=True),
    "SiLU of {}": F.silu,
}
_ROUNDED: dict[str, Change] = {
    "{} rounded to BF16": lambda t: t.bfloat16().float(),
    "{} rounded to FP16": lambda t: t.half().float(),
    "{} rounded to E4M3": lambda t: t.clamp(-448, 448).to(torch.float8_e4m3fn).float(),
    "{} rounded to INT8 with one scale": _int8,
    "{} rounded to NVFP4": _nvfp4,
}
#: Quantities whose blocks are changed one by one: more would be too many.
_BY_BLOCK = {"x of the scan", "B of the scan", "C of the scan", "the queries", "the keys", "the values"}
#: Of one block of channels; factors of blocks are looked for besides.
_INSIDE = ("{} in reverse order", "the two halves of {} swapped", "neighbouring channels of {} swapped")
#: Along the tokens: [b, s, channels].
_MOVED: dict[str, Change] = {
    "{} one token late": lambda t: F.pad(t, (0, 0, 1, 0))[:, :-1],
    "{} one token late, that of the first twice": lambda t: torch.cat([t[:, :1], t[:, :-1]], 1),
    "{} one token early": lambda t: F.pad(t, (0, 0, 0, 1))[:, 1:],
    "{} without that of the first token": lambda t: F.pad(t[:, 1:], (0, 0, 1, 0)),
    "the mean of {} so far": lambda t: t.cumsum(1) / torch.arange(1, t.shape[1] + 1)[None, :, None],
}


def _everywhere(change: Change) -> ChangeAt:
    return lambda t, c: change(t)


def _between(first: int | None, stop: int | None, change: Change) -> ChangeAt:
    """Of tokens `first` (None: after the prompt) to `stop` - 1 (None: all that follow)."""

    def of(t: Tensor, context: Context) -> Tensor:
        start = context.prompt if first is None else first
        end = t.shape[1] if stop is None else stop
        return torch.cat([t[:, :start], change(t)[:, start:end], t[:, end:]], 1)

    return of


def _in_block(number: int, count: int, change: Change) -> ChangeAt:
    def of(t: Tensor, context: Context) -> Tensor:
        blocks = list(t.unflatten(-1, (count, -1)).unbind(-2))
        blocks[number] = change(blocks[number])
        return torch.stack(blocks, -2).flatten(-2)

    return of


def listed(config: Nemotron3Config, token: int = 0) -> Iterator[Cause]:
    """Every change of every quantity, in all tokens, after the prompt, from a token on and at it, and of one
    block of channels.

    token: the first token that deviates, the same in all sequences; 0: no such one.
    """
    every = (*QUANTITIES, *MATRICES)
    movable = [one for one in every if one.tokens and one.kind != MODEL]
    for quantities, changes in ((every, _PLAIN), (movable, _MOVED)):
        for words, change in changes.items():
            yield from (one.cause(words, _everywhere(change), located=True) for one in quantities)
    for words, change in _ROUNDED.items():
        yield from (one.cause(words, _everywhere(change), located=True, rounds=True) for one in every)
    if token > 1:
        for n, what in ((token, f"every {token} tokens"), (0, f"before token {token}")):
            yield Cause(f"no state of the scan from {what}", "M", layer=_cut_scan(token, n), located=True)
            yield Cause(
                f"no window of the convolution from {what}", "M", layer=_cut_conv(token, n), located=True
            )
            yield Cause(f"no keys from {what}", "*", layer=_cut_keys(token, n), located=True)
    for words, change in (_PLAIN | _MOVED).items():
        for one in movable:
            yield one.cause(f"{words} after the prompt", _between(None, None, change), located=True)
            if token > 1:
                yield one.cause(f"{words} from token {token} on", _between(token, None, change), located=True)
                yield one.cause(f"{words} at token {token}", _between(token, token + 1, change), located=True)
    for one in (one for one in every if one.name in _BY_BLOCK):
        for block, count in list(one.divisions(config))[1:]:
            for number, words in product(range(count), _INSIDE):
                what = words.format(f"{block} {number} of {{}}")
                yield one.cause(what, _in_block(number, count, _PLAIN[words]), located=True)


def _edges(token: int, each: int, tokens: int) -> list[int]:
    return list(range(token, tokens, each)) if each else [token] * (token < tokens)


def _cut_scan(token: int, each: int) -> Make:
    return lambda context: cut_scan(partial(_edges, token, each))


def _cut_conv(token: int, each: int) -> Make:
    def conv(plain: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        parts = x.tensor_split(_edges(token, each, x.shape[1]), 1)
        return torch.cat([plain(part, taps, bias) for part in parts], 1)

    return step(conv=windowless(conv))


def _cut_keys(token: int, each: int) -> Make:
    def attend(plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        edges = _edges(token, each, q.shape[2])
        parts = (t.tensor_split(edges, 2) for t in (q, k, v))
        return torch.cat([plain(*part) for part in zip(*parts, strict=True)], 2)

    return step(attend=attend)


def _residual(other: Callable[[Any, Prefix, Tensor], Tensor]) -> Make:
    """The layer's update on another stream than the one before it."""
    return step(
        layer=lambda plain, prefix, x, run: plain(prefix, x, run) + other(plain.__self__, prefix, x) - x
    )


def residuals() -> Iterator[Cause]:
    """What a layer's update is added to."""
    for what, other in {
        "the update added to the normed input": lambda model, p, x: model.norm(x, p.hf + "norm.weight"),
        "no residual stream before the layer": lambda model, p, x: torch.zeros_like(x),
        "twice the residual stream before the layer": lambda model, p, x: 2 * x,
    }.items():
        yield Cause(what, LAYERS, layer=_residual(other), located=True)


#: Weights of a layer, by the ends of their names.
_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "M": ("in_proj", "conv1d.weight", "conv1d.bias", "A_log", "mixer.D", "dt_bias", "mixer.norm", "out_proj"),
    "*": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "E": ("gate.weight", "correction_bias", "shared_experts", ".experts."),
}


def neighbours() -> Iterator[Cause]:
    """Weights of the next or the previous layer of the kind, one tensor or all of them.

    The list of causes has latent projections.
    """
    for kind, ends in _WEIGHTS.items():
        for end in (*ends, "norm.weight", ""):
            for way, of in ((-1, "previous"), (1, "next")):
                what = end.removesuffix(".weight").removeprefix("mixer.").strip(".") or "every weight"
                name = f"{what} of the {of} layer of its kind"
                make = partial(of_other_layer, way=way, names=(end,))
                yield Cause(name, kind, layer=make, located=True)
