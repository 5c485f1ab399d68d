"""Causes in layers of experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.logits.reader import StoredDefinition
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.definition import Forward
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.proof.bisect.causes import (
    SHARDS,
    Cause,
    Context,
    Make,
    instead,
    of_kind,
    shard_order,
    step,
    where,
)
from megatron_nemotron3.proof.bisect.quantities import of_other_layer
from megatron_nemotron3.proof.bisect.recompute import Steps

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "SiLU": F.silu,
    "GELU": F.gelu,
    "a square without ReLU": torch.square,
}


def _remapped(order: Mapping[int, int]) -> Steps:
    """Expert e has the weights of expert order[e]; others keep theirs."""

    def mlp(plain: Any, name: str, u: Tensor) -> Any:
        return plain(re.sub(r"(?<=\.experts\.)\d+", lambda m: str(order.get(int(m[0]), m[0])), name), u)

    return {"mlp": mlp}


@where
def _experts(context: Context, order: Callable[[int], Tensor | None]) -> Steps | None:
    """Expert e has the weights of expert order[e]."""
    places = order(context.config.num_moe_experts or 0)
    return None if places is None else _remapped(dict(enumerate(places.tolist())))


def _in_order(ranks: int, order: str) -> Make:
    return _experts(lambda experts: shard_order(experts, ranks, order))


def _placed(ranks: int, inverse: bool) -> Make:
    """Expert e on rank e modulo the ranks, where ranks hold neighbours; or the reverse."""

    def order(experts: int) -> Tensor | None:
        if experts % ranks or experts == ranks:
            return None
        places = torch.arange(experts).view(-1, ranks).t().flatten()
        return torch.argsort(places) if inverse else places

    return _experts(order)


def _replaced(chosen: Callable[[Tensor], Tensor], other: StoredDefinition | None = None) -> Steps:
    """Some of the experts give zeros, or what those of another checkpoint do. `chosen`: which of them do."""

    def routed(plain: Any, name: str, z: Tensor, experts: Tensor, weights: Tensor) -> Any:
        gone = chosen(experts)
        found = plain(name, z, experts, weights.masked_fill(gone, 0.0))
        return (
            found
            if other is None
            else found + other.routed(name, z, experts, weights.masked_fill(~gone, 0.0))
        )

    return {"routed": routed}


@where
def _absent(context: Context, ranks: int, rank: int) -> Steps | None:
    size, uneven = divmod(context.config.num_moe_experts or 0, ranks)
    return None if uneven else _replaced(lambda topk: topk // size == rank)


def of_experts(chosen: tuple[int, ...], previous: StoredDefinition | None) -> Iterator[Cause]:
    """Causes in some experts, which a recording shows."""
    words = f"expert{'s' * (len(chosen) > 1)} {' and '.join(map(str, chosen))}"
    inside = lambda topk: torch.isin(topk, torch.tensor(chosen))  # noqa: E731
    made: dict[str, Make] = {f"no {words}": step(**_replaced(inside))}
    if previous is not None:
        made[f"routed {words} of the previous checkpoint"] = step(**_replaced(inside, previous))
    if len(chosen) == 2:
        swapped = dict(zip(chosen, chosen[::-1], strict=True))
        made[f"{words} swapped"] = step(**_remapped(swapped))
    return of_kind("E", made)


@where
def _factor(context: Context, value: Callable[[float], float]) -> Steps | None:
    old = context.config.moe_router_topk_scaling_factor or 1.0
    by = value(old) / old
    return None if abs(by - 1) < 1e-6 else {"probabilities": lambda plain, scores, c: plain(scores, c) * by}


def _scaled(scores: Tensor, c: Nemotron3Config) -> Tensor:
    return scores * (c.moe_router_topk_scaling_factor or 1)


def _softmax(scores: Tensor, c: Nemotron3Config) -> Tensor:
    return _scaled(scores.logit().softmax(-1), c)


@where
def _bias_kept(context: Context) -> Steps:
    """The expert bias is in the probabilities, too."""
    seen: list[Forward] = []

    def moe(plain: Any, name: str, prefix: Prefix, u: Tensor, run: Forward) -> Any:
        seen[:] = [run]
        return plain(name, prefix, u, run)

    def probabilities(plain: Any, scores: Tensor, c: Nemotron3Config) -> Any:
        routing = seen[0].routings[-1]
        return plain(routing.ranked.gather(-1, routing.chosen), c)

    return {"moe": moe, "probabilities": probabilities}


@where
def _topk(context: Context, more: int) -> Steps | None:
    def moe(plain: Any, name: str, prefix: Prefix, u: Tensor, run: Forward) -> Any:
        return plain(name, replace(prefix, config=prefix.config.but(moe_router_topk=new)), u, run)

    new = (context.config.moe_router_topk or 0) + more
    return {"moe": moe} if 1 < new <= (context.config.num_moe_experts or 0) else None


@where
def _latent_of(context: Context, way: int, names: tuple[str, ...]) -> Steps | None:
    """Latent projections of the next layer of experts (1), or of the previous one (-1)."""
    return of_other_layer(context, way, names) if context.config.moe_latent_size else None


def _times(n: int) -> Make:
    return step(shared=lambda plain, *given: n * plain(*given))


def _only(where: str, function: Callable[[Tensor], Tensor]) -> Make:
    """Another activation in routed experts or in the shared expert only."""

    def inside(plain: Any, *given: Any) -> Any:
        return plain.__func__(plain.__self__.but(activation=lambda original, x: function(x)), *given)

    return step(**{where: inside})


def _router_in_bf16(plain: Any, u: Tensor, name: str) -> Tensor:
    found: Tensor = plain(u.bfloat16().float(), name)
    return found.bfloat16().float()


def _unbiased(scores: Tensor, bias: Tensor) -> Tensor:
    return scores


def expert_causes() -> Iterator[Cause]:
    """Causes in E layers."""
    rounded = step(scores=lambda plain, logits: plain(logits.bfloat16().float()))
    both = {"router logits rounded to BF16": rounded, "routers in BF16": step(router=_router_in_bf16)}
    yield from of_kind("E", both, rounds=True)
    found: dict[str, Make] = {
        "a routed scaling factor of 1": _factor(lambda s: 1.0),
        "a routed scaling factor of 2.5": _factor(lambda s: 2.5),
        "a routed scaling factor of 5": _factor(lambda s: 5.0),
        "a routed scaling factor of its square": _factor(lambda s: s * s),
        "a routed scaling factor of its root": _factor(lambda s: s**0.5),
        "a routed scaling factor of its inverse": _factor(lambda s: 1 / s),
        "no routed experts": instead(probabilities=lambda scores, c: torch.zeros_like(scores)),
        "no shared expert": _times(0),
        "no expert bias in the router": instead(ranking=_unbiased),
        "the expert bias subtracted": instead(ranking=torch.sub),
        "the expert bias in the probabilities": _bias_kept(),
        "softmax scores in the router": instead(scores=lambda logits: logits.softmax(-1)),
        "a softmax over the selected experts": instead(probabilities=_softmax),
        "a softmax over the selected experts, and no expert bias": instead(
            probabilities=_softmax, ranking=_unbiased
        ),
        "no normalisation of the selected scores": instead(probabilities=_scaled),
        "one expert fewer per token": _topk(-1),
        "one expert more per token": _topk(1),
    }
    for word, function in _ACTIVATIONS.items():
        found[f"{word} instead of squared ReLU"] = instead(activation=function)
        for where_, what in (("routed", "routed experts"), ("shared", "the shared expert")):
            found[f"{word} instead of squared ReLU in {what} only"] = _only(where_, function)
    for ranks, order in SHARDS:
        found[f"the experts of {ranks} ranks {order}"] = _in_order(ranks, order)
    for ranks in (2, 4, 8):
        found[f"the shared expert {ranks} times"] = _times(ranks)
        found[f"experts dealt out to {ranks} ranks in turn"] = _placed(ranks, False)
        found[f"experts of {ranks} ranks collected in turn"] = _placed(ranks, True)
        for rank in range(ranks):
            found[f"no experts of rank {rank} of {ranks}"] = _absent(ranks, rank)
    for names, words in (
        (("fc1_latent", "fc2_latent"), "latent projections"),
        (("fc1_latent",), "first latent projection"),
        (("fc2_latent",), "second latent projection"),
    ):
        for way, of in ((-1, "previous"), (1, "next")):
            found[f"the {words} of the {of} layer of experts"] = _latent_of(way, names)
    yield from of_kind("E", found)
