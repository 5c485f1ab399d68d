"""Causes to try when a system deviates: small changes of a layer, of the model's ends, or of the tokens.

A cause says what to recompute instead. If the recomputation agrees with the deviating system as well as two
correct systems agree, it is named. `TABLE` has all of them; `causes_mamba`, `causes_attention` and
`causes_experts` those of layers of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.bisect.recompute import Change, Recomputation
from megatron_nemotron3.layers.functional import rms_norm
from megatron_nemotron3.models import Nemotron3Config

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


#: The change of a layer, or None where the cause cannot occur.
Make = Callable[[Context], Change | None]


@dataclass(frozen=True)
class Cause:
    """One way to be wrong.

    Attributes:
        name: what the deviating system does, to follow "it computes with": "no shared expert".
        kind: letter of the layers that it concerns, or `LAYERS`, `MODEL` or `TOKENS`.
        layer: the change of a layer.
        last: the change of the final norm and the output layer.
        ids: ids [s] to the ids that are embedded.
        embed: ids [s] to their embeddings [s, d].
        prefix: from the number of sequences and this one's, to what stands before its first token.
        reported: log-probabilities [s - 1] of tokens 1 to s to what the system reports.
        rounds: it rounds, so that two systems with it differ where a number lies between two others.
    """

    name: str
    kind: str
    layer: Make | None = None
    last: Make | None = None
    ids: Callable[[Tensor, Context], Tensor] | None = None
    embed: Callable[[Tensor], Tensor] | None = None
    prefix: Callable[[list[Tensor], int], Tensor | None] | None = None
    reported: Callable[[Tensor], Tensor] | None = None
    rounds: bool = False

    @property
    def moves(self) -> bool:
        """Whether it changes what is embedded."""
        return self.ids is not None or self.embed is not None

    def start(self, model: Recomputation, ids: Tensor, context: Context) -> Tensor:
        """What it embeds of ids [s]: [1, s, d]."""
        if self.ids is not None:
            ids = self.ids(ids, context)
        return model.embed(ids[None]) if self.embed is None else self.embed(ids)[None]


def step(**steps: Callable[..., Any]) -> Make:
    """A change of functions that is the same everywhere."""
    return lambda context: Change(steps=steps)


def shard_order(size: int, ranks: int, order: str) -> Tensor | None:
    """Places of `size` rows whose shards of `ranks` ranks lie in another order; None if they do not fit.

    Args:
        order: "reversed", "rotated", or "neighbours swapped" (0 and 1, 2 and 3, …).
    """
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


def columns_in_order(name: str, size: Callable[[Nemotron3Config], int], ranks: int, order: str) -> Make:
    """A row-parallel linear whose shards lie in another order. `name`: end of the tensor's name."""

    def make(context: Context) -> Change | None:
        places = shard_order(size(context.config), ranks, order)
        if places is None:
            return None
        inverse = torch.argsort(places)

        def linear(plain: Any, x: Tensor, tensor: str, rows: int) -> Any:
            return plain(x[..., inverse] if tensor.endswith(name) else x, tensor, rows)

        return Change(steps={"linear": linear})

    return make


# --- every layer, and the ends of the model --------------------------------------------------------------


def _rounded(dtype: torch.dtype) -> Callable[..., Any]:
    """The residual stream after a layer in another type."""

    def layer(plain: Any, prefix: Any, x: Tensor, *rest: Any) -> Any:
        update, routing = plain(prefix, x, *rest)
        return (x + update).to(dtype).float() - x, routing

    return layer


def _norm(gain: Callable[[Tensor], Tensor] | None = None, eps: float | None = None) -> Callable[..., Any]:
    def norm(plain: Any, x: Tensor, *names: str) -> Tensor:
        reference = plain.__self__
        weight = reference.weights.tensor(reference.weights.find(*names), (x.shape[-1],))
        old: float = reference.config.layernorm_epsilon
        return rms_norm(x, weight if gain is None else gain(weight), old if eps is None else eps)

    return norm


def _banded(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Other logits, band by band."""

    def logits(plain: Any, x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop, band in plain(x):
            yield start, stop, change(band)

    return logits


def _whole(change: Callable[[Tensor, Context], Tensor | None]) -> Make:
    """Logits whose order along the vocabulary is another one."""

    def make(context: Context) -> Change | None:
        places = change(torch.arange(context.config.vocab_size), context)
        if places is None:
            return None

        def logits(plain: Any, x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
            whole = torch.cat([band for _, _, band in plain(x)], -1)
            yield 0, whole.shape[-1], whole[..., places]

        return Change(steps={"logits": logits})

    return make


def _misplaced(ranks: int, padded_to: int, direction: int) -> Callable[[Tensor, Context], Tensor]:
    """Rows of a table whose shards begin where those of a table padded otherwise would."""

    def ids(tokens: Tensor, context: Context) -> Tensor:
        rows = context.config.vocab_size
        padded = -(-rows // padded_to) * padded_to
        shard = (padded if direction > 0 else rows) // ranks
        moved = tokens - direction * (tokens // shard) * ((padded - rows) // ranks)
        return moved.clamp(0, rows - 1)

    return ids


def _swapped_vocabulary(tokens: Tensor, context: Context) -> Tensor | None:
    half = context.config.vocab_size // 2
    places = shard_order(2 * half, 2, "reversed")
    if places is None or context.config.vocab_size % 2:
        return None
    return places[tokens]


def _before(sequences: list[Tensor], number: int) -> Tensor | None:
    return sequences[number - 1] if number else None


def _model_causes() -> Iterator[Cause]:
    for dtype, word in ((torch.bfloat16, "BF16"), (torch.float16, "FP16")):
        yield Cause(f"the residual stream in {word}", LAYERS, layer=step(layer=_rounded(dtype)), rounds=True)
    for eps in (1e-6, 1e-8, 1e-12, 1e-4):
        change = step(norm=_norm(eps=eps))
        yield Cause(f"epsilon {eps:.0e} in the norms before layers", LAYERS, layer=change)
        yield Cause(f"epsilon {eps:.0e} in every norm of the stream", MODEL, layer=change, last=change)
    gains = step(norm=_norm(gain=lambda gain: 1 + gain))
    yield Cause("1 + gain in every norm", LAYERS, layer=gains, last=gains)
    ones = step(norm=_norm(gain=torch.ones_like))
    yield Cause("no gains in the norms before layers", LAYERS, layer=ones)
    yield Cause("no final norm", MODEL, last=step(final_norm=lambda plain, x: x))
    yield Cause("no gain in the final norm", MODEL, last=ones)
    for cap in (15.0, 30.0, 50.0):
        capped = _banded(lambda logits, cap=cap: cap * torch.tanh(logits / cap))  # type: ignore[misc]
        yield Cause(f"logits capped at {cap:.0f} by tanh", MODEL, last=step(logits=capped))
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0):
        scaled = _banded(lambda logits, t=temperature: logits / t)  # type: ignore[misc]
        yield Cause(f"log-probabilities at temperature {temperature}", MODEL, last=step(logits=scaled))
    rounded = _banded(lambda logits: logits.bfloat16().float())
    yield Cause("logits rounded to BF16", MODEL, last=step(logits=rounded), rounds=True)
    yield Cause("the two halves of the output layer swapped", MODEL, last=_whole(_swapped_vocabulary))
    yield Cause("the two halves of the embedding swapped", MODEL, ids=_swapped_ids)
    for ranks in (2, 4, 8):
        for direction, how in ((1, "vocabulary instead of the padded one"), (-1, "padded vocabulary")):
            ids = _misplaced(ranks, 128, direction)
            where = f"cut into {ranks} shards by the {how}"
            yield Cause(f"the embedding {where}", MODEL, ids=ids)
            yield Cause(f"the output layer {where}", MODEL, last=_whole(ids))
    yield Cause("no embedding but that of token 0", MODEL, ids=lambda ids, context: torch.zeros_like(ids))
    yield Cause("log-probabilities one token late", TOKENS, reported=lambda p: torch.cat([p[:1], p[:-1]]))
    yield Cause("log-probabilities one token early", TOKENS, reported=lambda p: torch.cat([p[1:], p[-1:]]))
    for token in range(4):
        extra = torch.tensor([token])
        yield Cause(f"token {token} before the prompt", TOKENS, prefix=lambda all, i, t=extra: t)  # type: ignore[misc]
    yield Cause("the sequence before this one as its beginning", TOKENS, prefix=_before)


def _swapped_ids(ids: Tensor, context: Context) -> Tensor:
    places = _swapped_vocabulary(torch.arange(context.config.vocab_size), context)
    return ids if places is None else places[ids]


def stale_causes(previous: Recomputation) -> Iterator[Cause]:
    """Weights of an older checkpoint that were not updated."""
    old = previous.reference

    def layer(plain: Any, prefix: Any, x: Tensor, *rest: Any) -> Any:
        return old.layer(prefix, x, *rest)

    last = step(final_norm=lambda plain, x: old.final_norm(x), logits=lambda plain, x: old.logits(x))
    words = "of the previous checkpoint"
    yield Cause(f"weights {words}", LAYERS, layer=step(layer=layer))
    yield Cause(f"every weight {words}", MODEL, layer=step(layer=layer), last=last, embed=old.embed)
    yield Cause(f"the final norm and the output layer {words}", MODEL, last=last)
    yield Cause(f"the embedding {words}", MODEL, embed=old.embed)

    def router(plain: Any, x: Tensor, name: str, rows: int) -> Tensor:
        return (old.linear if ".router." in name else plain)(x, name, rows)

    yield Cause(f"routers {words}", "E", layer=step(linear=router))
    yield Cause(f"routed experts {words}", "E", layer=step(routed=lambda plain, *given: old.routed(*given)))
    yield Cause(f"shared experts {words}", "E", layer=step(shared=lambda plain, *given: old.shared(*given)))


def table() -> list[Cause]:
    """All causes."""
    from megatron_nemotron3.bisect.causes_attention import attention_causes
    from megatron_nemotron3.bisect.causes_experts import expert_causes
    from megatron_nemotron3.bisect.causes_mamba import mamba_causes

    return [*mamba_causes(), *attention_causes(), *expert_causes(), *_model_causes()]
