"""Causes to try when a system deviates: small changes of a layer, of the model's ends, or of the tokens.

A cause says what to recompute instead. If the recomputation agrees with the deviating system as well as two
correct systems agree, it is named. `causes_mixers` and `causes_experts` have those of layers of one kind,
`diagnose.cause_table` all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.definition import Forward
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.proof.bisect.recompute import Recomputation, Steps

P = ParamSpec("P")
#: Kinds of a cause: those of a layer, every layer of the model, its ends, the tokens.
LAYERS, MODEL, TOKENS = "any layer", "model", "tokens"


@dataclass(frozen=True)
class Context:
    """What a cause knows of the sequence and the place where it is tried."""

    config: Nemotron3Config
    #: Length of the prompt: tokens from there on may have been decoded one at a time.
    prompt: int
    #: Layer of the pattern, from 0; -1 outside the layers.
    layer: int = -1
    #: Length of the sequence before this one.
    before: int = 0


#: Other steps at a place, or None where the cause cannot occur.
Make = Callable[[Context], Steps | None]


@dataclass(frozen=True)
class Cause:
    """One way to be wrong.

    Attributes:
        name: what the deviating system does, to follow "it computes with": "no shared expert".
        kind: letter of the layers that it concerns, or `LAYERS`, `MODEL` or `TOKENS`.
        layer: other steps of a layer.
        last: other steps of the final norm and the output layer.
        ids: ids [s] to the ids that are embedded.
        embed: ids [s] to their embeddings [s, d].
        token: stands before the first one.
        joined: layers with a change see the sequence before this one as its beginning; without any, all do.
        reported: log-probabilities [s - 1] of tokens 1 to s to what the system reports.
        mtp: the checkpoint whose MTP blocks run instead.
        located: it is tried only where hidden states name the layers.
        rounds: it rounds, so that two systems with it differ where a number lies between two others.
    """

    name: str
    kind: str
    layer: Make | None = None
    last: Make | None = None
    ids: Callable[[Tensor, Context], Tensor] | None = None
    embed: Callable[[Tensor], Tensor] | None = None
    token: int | None = None
    joined: bool = False
    reported: Callable[[Tensor], Tensor] | None = None
    mtp: Recomputation | None = None
    located: bool = False
    rounds: bool = False

    @property
    def moves(self) -> bool:
        return self.ids is not None or self.embed is not None

    def start(self, model: Recomputation, ids: Tensor, context: Context) -> Tensor:
        if self.ids is not None:
            ids = self.ids(ids, context)
        return model.embed(ids[None]) if self.embed is None else self.embed(ids)[None]


def step(**steps: Callable[..., Any]) -> Make:
    """Other steps that are the same everywhere."""
    return lambda context: steps


def instead(**steps: Callable[..., Any]) -> Make:
    """The same for functions that do not call the original ones."""
    return step(**{name: partial(_without, function) for name, function in steps.items()})


def _without(function: Callable[..., Any], plain: Any, *given: Any) -> Any:
    return function(*given)


def where(steps: Callable[Concatenate[Context, P], Steps | None]) -> Callable[P, Make]:
    """Decorate what gives the steps for a place, or None where the cause cannot occur."""
    return lambda *args, **options: lambda context: steps(context, *args, **options)


def windowless(conv: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step `conv` from one of x [b, s, channels], without the window of tokens before it."""

    def step(plain: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        window = taps.shape[-1] - 1
        padded = lambda x, taps, bias: plain(F.pad(x, (0, 0, window, 0)), taps, bias)  # noqa: E731
        return conv(padded, x[:, window:], taps, bias)

    return step


def of_kind(
    kind: str, made: Mapping[str, Make], *, rounds: bool = False, located: bool = False
) -> Iterator[Cause]:
    """Causes in layers of a kind, by name."""
    return (Cause(name, kind, layer=make, rounds=rounds, located=located) for name, make in made.items())


def shard_order(size: int, ranks: int, order: str) -> Tensor | None:
    """Places of `size` rows whose shards of `ranks` ranks lie in another order; None if they do not fit."""
    if ranks < 2 or size % ranks or (ranks == 2 and order != "reversed"):
        return None
    shards = torch.arange(size).view(ranks, -1)
    if order == "reversed":
        shards = shards.flip(0)
    elif order == "rotated":
        shards = shards.roll(1, 0)
    else:
        shards = shards.view(ranks // 2, 2, -1).flip(1).reshape(ranks, -1)
    return shards.flatten()


#: Ranks and orders of shards to try.
SHARDS = [(2, "reversed"), *((n, o) for n in (4, 8) for o in ("reversed", "rotated", "neighbours swapped"))]


def shards_of_rows(words: str, name: str) -> dict[str, Make]:
    """A row-parallel linear whose shards lie in another order or are missing. `name`: end of the tensor's."""

    def linear(ranks: int, order: str, plain: Any, x: Tensor, tensor: str) -> Any:
        places = shard_order(x.shape[-1], ranks, order) if tensor.endswith(name) else None
        return plain(x if places is None else x[..., torch.argsort(places)], tensor)

    def without(ranks: int, rank: int, plain: Any, x: Tensor, tensor: str) -> Any:
        if tensor.endswith(name) and not x.shape[-1] % ranks:
            kept = torch.arange(ranks).repeat_interleave(x.shape[-1] // ranks) != rank
            x = x * kept
        return plain(x, tensor)

    return {
        f"the shards of {ranks} ranks of {words} {order}": step(linear=partial(linear, ranks, order))
        for ranks, order in SHARDS
    } | {
        f"no shard of rank {rank} of {ranks} of {words}": step(linear=partial(without, ranks, rank))
        for ranks in (2, 4, 8)
        for rank in range(ranks)
    }


_EPSILONS = 1e-6, 1e-8, 1e-12, 1e-4, 1e-3, 1e-2


# --- every layer, and the ends of the model --------------------------------------------------------------


def _rounded(dtype: torch.dtype) -> Callable[..., Any]:
    """The residual stream after a layer in another type."""

    return lambda plain, prefix, x, run: (x + plain(prefix, x, run)).to(dtype).float() - x


def _norm(gain: Callable[[Tensor], Tensor] | None = None, eps: float | None = None) -> Callable[..., Any]:
    def norm(plain: Any, x: Tensor, name: str) -> Any:
        model = plain.__self__
        weight = model.weight(name)
        normed = model.rms(x, model.config.layernorm_epsilon if eps is None else eps)
        return normed * (weight if gain is None else gain(weight))

    return norm


def _banded(change: Callable[..., Tensor], *more: float) -> Make:
    """Other logits, band by band, from them and more arguments."""
    return step(vocabulary=lambda plain, h: (change(band, *more) for band in plain(h)))


def _capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


@where
def _whole(context: Context, places: Callable[[Tensor, Context], Tensor]) -> Steps:
    """Logits whose order along the vocabulary is another one."""

    def vocabulary(plain: Any, h: Tensor) -> Iterator[Tensor]:
        whole = torch.cat(list(plain(h)), -1)
        yield whole[..., places(torch.arange(whole.shape[-1]), context)]

    return {"vocabulary": vocabulary}


def _misplaced(ranks: int, padded_to: int, direction: int) -> Callable[[Tensor, Context], Tensor]:
    """Rows of a table whose shards begin where those of a table padded otherwise would."""

    def ids(tokens: Tensor, context: Context) -> Tensor:
        rows = context.config.vocab_size
        padded = -(-rows // padded_to) * padded_to
        shard = (padded if direction > 0 else rows) // ranks
        moved = tokens - direction * (tokens // shard) * ((padded - rows) // ranks)
        return moved.clamp(0, rows - 1)

    return ids


@where
def _padded(context: Context, multiple: int) -> Steps | None:
    """Rows of zeros behind the vocabulary count as tokens."""
    rows = context.config.vocab_size
    count = -rows % multiple

    def vocabulary(plain: Any, h: Tensor) -> Iterator[Tensor]:
        yield from plain(h)
        yield h.new_zeros(*h.shape[:-1], count)

    return {"vocabulary": vocabulary} if count else None


def _tied(plain: Any, h: Tensor) -> Any:
    """Logits by the table of the embedding."""
    return plain.__self__.products(h, f"{plain.__self__.root}.embeddings.weight")


@where
def _convolved_alone(context: Context) -> Steps:
    """The convolution starts anew behind the sequence before."""

    def conv(plain: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([plain(part, taps, bias) for part in x.tensor_split([context.before], 1)], 1)

    return {"conv": windowless(conv)}


def _halves_swapped(tokens: Tensor, context: Context) -> Tensor:
    """The same tokens where the vocabulary has no halves."""
    rows = context.config.vocab_size
    return tokens if rows % 2 else (tokens + rows // 2) % rows


def model_causes() -> Iterator[Cause]:
    """Causes in every layer, at the ends of the model, and in the tokens."""
    for dtype, word in ((torch.bfloat16, "BF16"), (torch.float16, "FP16")):
        yield Cause(f"the residual stream in {word}", LAYERS, layer=step(layer=_rounded(dtype)), rounds=True)
    for eps in _EPSILONS:
        change = step(norm=_norm(eps=eps))
        yield Cause(f"epsilon {eps:.0e} in the norms before layers", LAYERS, layer=change)
        yield Cause(f"epsilon {eps:.0e} in every norm of the stream", MODEL, layer=change, last=change)
    gains = step(norm=_norm(gain=lambda gain: 1 + gain))
    yield Cause("1 + gain in the norms of the layers", LAYERS, layer=gains)
    yield Cause("1 + gain in every norm", MODEL, layer=gains, last=gains)
    ones = step(norm=_norm(gain=torch.ones_like))
    yield Cause("no gains in the norms before layers", LAYERS, layer=ones)
    rounded = _banded(lambda logits: logits.bfloat16().float())
    yield Cause("logits rounded to BF16", MODEL, last=rounded, rounds=True)
    last = {
        "no final norm": instead(norm=lambda x, name: x),
        "no gain in the final norm": ones,
        "the two halves of the output layer swapped": _whole(_halves_swapped),
        "the embedding as the output layer": step(vocabulary=_tied),
        **{f"epsilon {eps:.0e} in the final norm": step(norm=_norm(eps=eps)) for eps in _EPSILONS},
        **{f"padding to a multiple of {n} in the vocabulary": _padded(n) for n in (8, 16, 64, 128, 256, 512)},
        **{f"logits capped at {cap:.0f} by tanh": _banded(_capped, cap) for cap in (15.0, 30.0, 50.0)},
        **{
            f"log-probabilities at temperature {temperature}": _banded(torch.div, temperature)
            for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
        },
    }
    ids = {
        "the two halves of the embedding swapped": _halves_swapped,
        "token ids one too low": lambda ids, context: (ids - 1).clamp_min(0),
        "token ids one too high": lambda ids, context: (ids + 1).clamp_max(context.config.vocab_size - 1),
        "no embedding but that of token 0": lambda ids, context: torch.zeros_like(ids),
    }
    for ranks in (2, 4, 8):
        for direction, how in ((1, "vocabulary instead of the padded one"), (-1, "padded vocabulary")):
            other = _misplaced(ranks, 128, direction)
            ids[f"the embedding cut into {ranks} shards by the {how}"] = other
            last[f"the output layer cut into {ranks} shards by the {how}"] = _whole(other)
    yield from (Cause(name, MODEL, last=make) for name, make in last.items())
    yield from (Cause(name, MODEL, ids=of) for name, of in ids.items())
    yield Cause("log-probabilities one token late", TOKENS, reported=lambda p: torch.cat([p[:1], p[:-1]]))
    yield Cause("log-probabilities one token early", TOKENS, reported=lambda p: torch.cat([p[1:], p[-1:]]))
    for base in (2, 10):
        yield Cause(
            f"logarithms to base {base}", TOKENS, reported=partial(torch.mul, other=1 / math.log(base))
        )
    for token in range(4):
        yield Cause(f"token {token} before the prompt", TOKENS, token=token)
    yield Cause("the sequence before this one as its beginning", TOKENS, joined=True)
    yield Cause("states of the sequence before this one", "M", layer=step(), joined=True)
    alone = _convolved_alone()
    yield Cause("SSM states of the sequence before this one", "M", layer=alone, joined=True)
    yield Cause("keys of the sequence before this one", "*", layer=step(), joined=True)


def stale_causes(previous: Recomputation) -> Iterator[Cause]:
    """Weights of an older checkpoint that were not updated."""
    old = previous.definition

    def layer(plain: Any, prefix: Prefix, x: Tensor, run: Forward) -> Tensor:
        return old.layer(prefix, x, run)

    last = step(norm=lambda plain, *given: old.norm(*given), vocabulary=lambda plain, h: old.vocabulary(h))
    words = "of the previous checkpoint"
    yield Cause(f"weights {words}", LAYERS, layer=step(layer=layer))
    yield Cause(f"every weight {words}", MODEL, layer=step(layer=layer), last=last, embed=old.embed)
    yield Cause(f"the final norm and the output layer {words}", MODEL, last=last)
    yield Cause(f"the embedding {words}", MODEL, embed=old.embed)

    yield Cause(f"MTP {words}", "mtp", mtp=previous)
    yield Cause(f"routers {words}", "E", layer=step(router=lambda plain, *given: old.router(*given)))
    yield Cause(f"routed experts {words}", "E", layer=step(routed=lambda plain, *given: old.routed(*given)))
    yield from _stale_tensors(previous, words)
    yield Cause(f"shared experts {words}", "E", layer=step(shared=lambda plain, *given: old.shared(*given)))


def _stale_tensors(previous: Recomputation, words: str) -> Iterator[Cause]:
    """Single tensors of a layer, parts of them, and halves of matrices, that were not updated."""
    old, c = previous.definition, previous.config
    found: dict[tuple[str, str], tuple[tuple[str, ...], slice, int]] = {}  # names, rows, axes
    for prefix in previous.layers[: previous.depth]:
        for name, stored in old.weights.source.tensors.items():
            if name.startswith(prefix.hf) and ".experts." not in name:
                below = name.removeprefix(prefix.hf)
                found[prefix.part, below] = (below,), slice(None), len(stored.shape)
    bc = c.mamba_num_groups * c.mamba_state_dim
    conv = {"x": c.mamba_inner_size, "B": bc, "C": bc}
    parts = {"in_proj": {"z": c.mamba_inner_size, **conv, "dt": c.mamba_num_heads}, "conv1d": conv}
    for (kind, name), (names, _, axes) in list(found.items()):
        start = 0
        for part, count in parts.get(name.split(".")[-2], {}).items():
            found[kind, f"{name}.{part}"] = names, slice(start, start + count), axes
            start += count
    found["*", "mixer.q_proj, k_proj and v_proj"] = (
        tuple(f"mixer.{part}_proj.weight" for part in "qkv"),
        slice(None),
        2,
    )
    for (kind, name), (names, rows, axes) in found.items():
        for what, half in {"": None, **(_HALVES if axes == 2 else {})}.items():
            make = _stale(previous, names, rows, half)
            yield Cause(f"{what}{name} {words}", kind, layer=make, located=True)


@where
def _stale(
    context: Context,
    previous: Recomputation,
    names: tuple[str, ...],
    rows: slice,
    half: tuple[int, int] | None,
) -> Steps:
    """Rows of tensors of a layer, or half of them along an axis, that were not updated."""
    whole = [previous.layers[context.layer].hf + name for name in names]

    def weight(plain: Any, name: str) -> Any:
        new = plain(name)
        if name in whole:
            new = new.clone()
            old = previous.definition.weight(name)[rows]
            axis, number = half or (0, 0)
            parts = 1 if half is None else 2
            new[rows].chunk(parts, axis)[number].copy_(old.chunk(parts, axis)[number])
        return new

    def linear(plain: Any, x: Tensor, name: str) -> Any:
        return x @ plain.__self__.weight(name).T if name in whole else plain(x, name)

    return {"weight": weight, "linear": linear}


_HALVES = {
    f"the {word} half of the {what} of ": (dim, half)
    for dim, what in enumerate(("rows", "columns"))
    for half, word in enumerate(("first", "second"))
}
