"""Causes by name: positions and keys of attention, routers, the model's ends, and the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models.definition import Forward
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.proof.bisect.causes import MODEL, TOKENS, Cause, Context, Make, step, where
from megatron_nemotron3.proof.bisect.changes import TILES
from megatron_nemotron3.proof.bisect.quantities import Change, Quantity, changed, weighted
from megatron_nemotron3.proof.bisect.recompute import Recomputation, Steps
from megatron_nemotron3.proof.bisect.weights import of_previous


def _rotary(base: float, pairs: bool, share: float) -> Make:
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


#: Sets of keys u [1, s] of queries t [s, 1], given a size n and a border b.
_Keys = Callable[[Tensor, Tensor, int, int], Tensor]
_KEYS: dict[str, _Keys] = {
    "own key": lambda t, u, n, b: u == t,
    "next key": lambda t, u, n, b: u == t + 1,
    "later keys": lambda t, u, n, b: u > t,
    "first key": lambda t, u, n, b: u == 0,
    "keys outside a window of {n} tokens": lambda t, u, n, b: u <= t - n,
    "keys outside a window of {n} tokens but the first four": lambda t, u, n, b: (u <= t - n) & (u > 3),
    "later keys of its tile of {n}": lambda t, u, n, b: (u > t) & (u // n == t // n),
    "earlier keys of its tile of {n}": lambda t, u, n, b: (u < t) & (u // n == t // n),
    "keys of other tiles of {n}": lambda t, u, n, b: u // n != t // n,
    "keys of the last tile of {n} unless it is full": lambda t, u, n, b: (u >= (t + 1) // n * n) & (t >= n),
    "first {n} keys": lambda t, u, n, b: u < n,
    "keys before {b}": lambda t, u, n, b: u < b,
    "keys from {b} on": lambda t, u, n, b: u >= b,
    "keys from {b} on but its own": lambda t, u, n, b: (u >= b) & (u != t),
    "last key before {b}": lambda t, u, n, b: u == b - 1,
    "first key behind {b}": lambda t, u, n, b: u == b,
    "later keys before {b}": lambda t, u, n, b: (u > t) & (u < b),
    "last keys, as many as are before {b}": lambda t, u, n, b: u > t - b,
}
#: How often keys count, given those that a token sees and those of a set.
_SEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no {}": lambda seen, keys: seen & ~keys,
    "{} twice": lambda seen, keys: seen * (1 + keys.int()),
    "{}, too": lambda seen, keys: seen | keys,
}


@where
def _sighted(context: Context, keys: _Keys, how: str, later: bool, n: int, border: int) -> Steps | None:
    b = border or context.prompt

    def weights(scores: Tensor, t: Tensor, u: Tensor) -> Tensor:
        seen = u <= t
        other = _SEEN[how](seen, keys(t, u, n, b)).float()
        stays = (other.sum(-1, keepdim=True) == 0) | ((t < b) & later)
        return (scores + torch.where(stays, seen.float(), other).log()).softmax(-1)

    return {"attend": weighted(weights)} if b else None


def sights(token: int) -> Iterator[Cause]:
    """Other visible keys. token: the first that deviates, by which more is tried; 0: the prompt's end."""
    sizes = dict.fromkeys((*TILES, 256, 512, 1024, 2048, 4096, *((token,) if token > 1 else ())))
    borders = {"the prompt's end": 0} | {f"token {n}": n for n in sizes if token and n < 1024}
    for (words, keys), how in product(_KEYS.items(), _SEEN):
        if how == "{} twice" and not token or how == "{}, too" and not words.startswith(("later", "next")):
            continue
        for n in sizes if "{n}" in words and (token or "window" in words) else [64]:
            if "{b}" not in words:
                yield Cause(how.format(words.format(n=n)), "*", _sighted(keys, how, False, n, 1))
            at = [(b, place, "" if "{b}" in words else f" from {place} on") for place, b in borders.items()]
            for b, place, of in at if token or "{b}" in words else []:
                made = _sighted(keys, how, not words.startswith("later keys before"), n, b)
                yield Cause(how.format(words.format(n=n, b=place) + of), "*", made)


def _summed(border: int, context: Context, change: Change) -> Steps:
    """Logarithms of the sums of attention before and from a border on [b, h, s, 2], by which they merge."""

    def weights(scores: Tensor, t: Tensor, u: Tensor) -> Tensor:
        gone = torch.stack([(u > t) | (u >= border), (u > t) | (u < border)])
        parts = scores.masked_fill(gone[:, None, None], -torch.inf)
        sums = parts.logsumexp(-1)
        new = change(sums.movedim(0, -1)).movedim(-1, 0).masked_fill(sums.isinf(), -torch.inf).softmax(0)
        return (parts.softmax(-1).nan_to_num() * new[..., None]).sum(0)

    return {"attend": weighted(weights)}


def summed(token: int) -> Quantity:
    """Attention in two parts."""
    name = f"the logarithms of the sums of attention before and from token {token} on"
    return Quantity(name, "*", partial(_summed, token), tokens=False)


def attention_causes() -> Iterator[Cause]:
    """Causes in * layers."""
    for base, pairs, share in product((1e4, 1e5, 5e5, 1e6, 1e7), (False, True), (1.0, 0.5)):
        words = f"{' on half of the channels' * (share < 1)}{', neighbouring ones' * pairs}"
        yield Cause(f"rotary positions of base {base:.0e}{words}", "*", _rotary(base, pairs, share))
    yield from sights(0)


# --- experts ---------------------------------------------------------------------------------------------


def of_experts(chosen: tuple[int, ...], previous: Recomputation | None) -> Iterator[Cause]:
    """Causes in some experts, which a recording shows."""
    if not chosen:
        return
    words, which = f"expert{'s' * (len(chosen) > 1)} {' and '.join(map(str, chosen))}", torch.tensor(chosen)
    yield from changed("the shares of the experts", {f"no {words}": lambda t: t.index_fill(-1, which, 0)})
    if previous is not None:
        names = rf"\.experts\.({'|'.join(map(str, chosen))})\."
        yield of_previous(previous, f"routed {words}", "E", names)
    if len(chosen) == 2:
        swapped: Change = lambda t: t.index_copy(0, which, which.flip(0))  # noqa: E731
        yield from changed("the experts", {f"{words} swapped": swapped})


@where
def _factor(context: Context, value: Callable[[float], float]) -> Steps | None:
    old = context.config.moe_router_topk_scaling_factor or 1.0
    by = value(old) / old
    return None if abs(by - 1) < 1e-6 else {"probabilities": lambda plain, scores, c: plain(scores, c) * by}


_Scores = Callable[[Tensor, Tensor], Tensor]


def _top(ranks: Tensor, count: int) -> Tensor:
    return ranks.topk(max(1, count), -1).indices


#: By what experts are ranked, given logits and bias [b, s, e].
_RANKED: dict[str, _Scores] = {
    "": lambda x, bias: x.sigmoid() + bias,
    "no expert bias in the router": lambda x, bias: x,
    "experts ranked by logits and bias": torch.add,
    "experts ranked by softmax and bias": lambda x, bias: x.softmax(-1) + bias,
    "the expert bias subtracted": lambda x, bias: x.sigmoid() - bias,
    "experts ranked by score times bias": lambda x, bias: x.sigmoid() * bias,
}
#: Which are chosen, given ranks and their number k.
_CHOSEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "": _top,
    "one expert fewer per token": lambda r, k: _top(r, k - 1),
    "one expert more per token": lambda r, k: _top(r, k + 1),
    "one expert more, without the best one": lambda r, k: _top(r, k + 1)[..., 1:],
    "no best expert": lambda r, k: _top(r, k)[..., 1:],
    "one expert more, without the highest number": lambda r, k: _top(r, k + 1).sort(-1).values[..., :-1],
    "one expert more, without the lowest number": lambda r, k: _top(r, k + 1).sort(-1).values[..., 1:],
}
#: What they count, before they are normalised.
_COUNTED: dict[str, _Scores] = {
    "": lambda x, bias: x.sigmoid(),
    "experts weighted by logits": lambda x, bias: x,
    "the expert bias in the probabilities": lambda x, bias: x.sigmoid() + bias,
    "experts weighted by softmax": lambda x, bias: x.softmax(-1),
    "experts with equal weights": lambda x, bias: torch.ones_like(x),
    "experts weighted by squared scores": lambda x, bias: x.sigmoid().square(),
}
#: How, given the chosen [b, s, k] and those of all experts.
_NORMED: dict[str, _Scores] = {
    "": lambda w, all: w / (w.sum(-1, keepdim=True) + 1e-20),
    "no normalisation of the selected scores": lambda w, all: w,
    "scores normalised over all experts": lambda w, all: w / all.sum(-1, keepdim=True),
    "scores normalised over one expert more": lambda w, all: (
        w / all.topk(w.shape[-1] + 1).values.sum(-1, True)
    ),
    "scores normalised by the largest": lambda w, all: w / w.amax(-1, keepdim=True),
}
#: Which weight an expert has, given weights and experts by rank.
_PAIRED: dict[str, _Scores] = {
    "": lambda w, e: w,
    "weights by size and experts by number": lambda w, e: w.sort(-1, descending=True).values.gather(
        -1, e.argsort(-1).argsort(-1)
    ),
    "weights by expert number and experts by rank": lambda w, e: w.gather(-1, e.argsort(-1)),
    "weights in reverse of the experts": lambda w, e: w.flip(-1),
    "weights of the next expert": lambda w, e: w.roll(1, -1),
}
_AXES: tuple[dict[str, Any], ...] = (_RANKED, _CHOSEN, _COUNTED, _NORMED, _PAIRED)


@where
def _routed(context: Context, names: Sequence[str]) -> Steps:
    ranked, chosen, counted, normed, paired = (axis[name] for axis, name in zip(_AXES, names, strict=True))
    bias: list[Tensor] = []

    def ranking(plain: Any, scores: Tensor, given: Tensor) -> Any:
        bias[:] = [given]
        return plain(scores, given)

    def moe(plain: Any, name: str, prefix: Prefix, u: Tensor, run: Forward) -> Any:
        def routed(plain: Any, name: str, z: Tensor, own: Tensor, weights: Tensor) -> Any:
            logits = run.routings[-1].logits
            taken = chosen(ranked(logits, bias[0]), own.shape[-1])
            every = counted(logits, bias[0])
            found = paired(normed(every.gather(-1, taken), every), taken)
            return plain(name, z, taken, found * (context.config.moe_router_topk_scaling_factor or 1.0))

        return plain.__func__(plain.__self__.but(ranking=ranking, routed=routed), name, prefix, u, run)

    return {"moe": moe}


def routers(count: int) -> Iterator[Cause]:
    """Routers of which so many parts are others."""
    for places in combinations(range(len(_AXES)), count):
        for words in product(*([w for w in _AXES[n] if w] for n in places)):
            names = ["" if n not in places else words[places.index(n)] for n in range(len(_AXES))]
            yield Cause(", ".join(words), "E", layer=_routed(tuple(names)), located=count > 1)


def expert_causes() -> Iterator[Cause]:
    """Causes in E layers."""
    rounded = step(router=lambda plain, u, name: plain(u.bfloat16().float(), name).bfloat16().float())
    yield Cause("routers in BF16", "E", layer=rounded, rounds=True)
    yield from routers(1)
    found: dict[str, Make] = {
        **{f"a routed scaling factor of {n:g}": _factor(lambda s, n=n: n) for n in (1, 2.5, 5)},  # type: ignore[misc]
        "a routed scaling factor of its square": _factor(lambda s: s * s),
        "softmax scores in the router": step(scores=lambda plain, logits: logits.softmax(-1)),
    }
    yield from (Cause(name, "E", made) for name, made in found.items())
    softmax = _routed(("no expert bias in the router", "", "experts weighted by softmax", "", ""))
    yield Cause("a softmax over the selected experts, and no expert bias", "E", softmax)


# --- the model's end, and the tokens ----------------------------------------------------------------------


@where
def _padded(context: Context, multiple: int) -> Steps | None:
    """Rows of zeros behind the vocabulary count as tokens."""
    count = -context.config.vocab_size % multiple

    def vocabulary(plain: Any, h: Tensor) -> Iterator[Tensor]:
        yield from plain(h)
        yield h.new_zeros(*h.shape[:-1], count)

    return {"vocabulary": vocabulary} if count else None


def model_causes() -> Iterator[Cause]:
    """Causes at the end of the model, and in the tokens."""
    yield Cause("no final norm", MODEL, last=step(norm=lambda plain, x, name: x))
    table = lambda m, h: m.products(h, f"{m.root}.embeddings.weight")  # noqa: E731
    tied = step(vocabulary=lambda plain, h: table(plain.__self__, h))
    yield Cause("the embedding as the output layer", MODEL, last=tied)
    for n in (8, 16, 64, 128, 256, 512, 1024):
        yield Cause(f"padding to a multiple of {n} in the vocabulary", MODEL, last=_padded(n))
    yield Cause("log-probabilities one token late", TOKENS, reported=lambda p: torch.cat([p[:1], p[:-1]]))
    yield Cause("log-probabilities one token early", TOKENS, reported=lambda p: torch.cat([p[1:], p[-1:]]))
    for base in (2, 10):
        by = partial(torch.mul, other=1 / math.log(base))
        yield Cause(f"logarithms to base {base}", TOKENS, reported=by)
    for token in range(4):
        yield Cause(f"token {token} before the prompt", TOKENS, token=token)
    yield Cause("the sequence before this one as its beginning", TOKENS, joined=True)
