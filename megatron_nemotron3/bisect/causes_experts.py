"""Causes in layers of experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.bisect.causes import SHARDS, Cause, Context, Make, shard_order, step
from megatron_nemotron3.bisect.recompute import Change
from megatron_nemotron3.models import Nemotron3Config


def _experts(order: Callable[[int], Tensor | None]) -> Make:
    """Expert e has the weights of expert order[e]."""

    def make(context: Context) -> Change | None:
        places = order(context.config.num_moe_experts or 0)
        return None if places is None else Change(experts=dict(enumerate(places.tolist())))

    return make


def _placed(ranks: int, inverse: bool) -> Callable[[int], Tensor | None]:
    """Expert e on rank e modulo the ranks, where ranks hold neighbours; or the reverse."""

    def order(experts: int) -> Tensor | None:
        if experts % ranks or experts == ranks:
            return None
        places = torch.arange(experts).view(-1, ranks).t().flatten()
        return torch.argsort(places) if inverse else places

    return order


def _absent(ranks: int, rank: int) -> Make:
    """The experts of a rank give zeros."""

    def make(context: Context) -> Change | None:
        experts = context.config.num_moe_experts or 0
        if experts % ranks:
            return None
        size = experts // ranks

        def routed(plain: Any, prefix: str, x: Tensor, ffn: int, topk: Tensor, probabilities: Tensor) -> Any:
            gone = topk // size == rank
            return plain(prefix, x, ffn, topk, probabilities.masked_fill(gone, 0.0))

        return Change(steps={"routed": routed})

    return make


def _weights(change: Callable[[Any, Tensor, Nemotron3Config], Tensor]) -> Make:
    """Other probabilities, of the plain function, the chosen scores [n, topk] and the config."""
    return step(probabilities=change)


def _factor(value: Callable[[float], float]) -> Make:
    """Another factor of the routed experts."""

    def make(context: Context) -> Change | None:
        old = context.config.moe_router_topk_scaling_factor or 1.0
        by = value(old) / old
        if abs(by - 1) < 1e-6:
            return None
        return Change(steps={"probabilities": lambda plain, scores, c: plain(scores, c) * by})

    return make


def _bias_kept() -> Make:
    """The expert bias is in the probabilities, too."""

    def make(context: Context) -> Change | None:
        seen: list[Tensor] = []

        def moe(plain: Any, prefix: str, c: Any, x: Tensor, settle: Any = None) -> Any:
            def noted(selection: Any) -> Tensor:
                taken: Tensor = selection.experts if settle is None else settle(selection)
                seen.append(selection.scores.gather(1, taken))
                return taken

            seen.clear()
            return plain(prefix, c, x, noted)

        def probabilities(plain: Any, chosen: Tensor, c: Any) -> Any:
            return plain(torch.cat(seen), c)

        return Change(steps={"moe": moe, "probabilities": probabilities})

    return make


def _topk(more: int) -> Make:
    """Another number of experts per token."""

    def moe(plain: Any, prefix: str, c: Any, x: Tensor, settle: Any = None) -> Any:
        return plain(prefix, c.but(moe_router_topk=c.moe_router_topk + more), x, settle)

    def make(context: Context) -> Change | None:
        c = context.config
        new = (c.moe_router_topk or 0) + more
        return Change(steps={"moe": moe}) if 1 < new <= (c.num_moe_experts or 0) else None

    return make


def _latent_of(other: Callable[[list[int], int], int | None], *names: str) -> Make:
    """Latent projections of another layer."""

    def make(context: Context) -> Change | None:
        c = context.config
        layers = [number for number, kind in enumerate(c.pattern) if kind == "E"]
        if not c.moe_latent_size or context.layer not in layers:
            return None
        number = other(layers, layers.index(context.layer))
        if number is None:
            return None

        def linear(plain: Any, x: Tensor, name: str, rows: int) -> Any:
            if any(part in name for part in names):
                name = re.sub(r"layers\.\d+\.", f"layers.{number}.", name, count=1)
            return plain(x, name, rows)

        return Change(steps={"linear": linear})

    return make


def _neighbour(step_: int) -> Callable[[list[int], int], int | None]:
    return lambda layers, i: layers[i + step_] if 0 <= i + step_ < len(layers) else None


def expert_causes() -> Iterator[Cause]:
    """Causes in E layers."""

    def cause(name: str, make: Make) -> Cause:
        return Cause(name, "E", layer=make)

    for ranks, order in SHARDS:
        places = lambda n, r=ranks, o=order: shard_order(n, r, o)  # noqa: E731
        yield cause(f"the experts of {ranks} ranks {order}", _experts(places))
    for ranks in (2, 4, 8):
        yield cause(f"experts dealt out to {ranks} ranks in turn", _experts(_placed(ranks, False)))
        yield cause(f"experts of {ranks} ranks collected in turn", _experts(_placed(ranks, True)))
        for rank in range(ranks):
            yield cause(f"no experts of rank {rank} of {ranks}", _absent(ranks, rank))
    for words, value in (
        ("1", lambda s: 1.0),
        ("2.5", lambda s: 2.5),
        ("5", lambda s: 5.0),
        ("its square", lambda s: s * s),
        ("its root", lambda s: s**0.5),
        ("its inverse", lambda s: 1 / s),
    ):
        yield cause(f"a routed scaling factor of {words}", _factor(value))
    yield cause("no routed experts", _weights(lambda plain, s, c: torch.zeros_like(s)))
    yield cause("no shared expert", step(shared=lambda plain, *given: 0 * plain(*given)))
    for ranks in (2, 4, 8):
        times = lambda plain, *given, n=ranks: n * plain(*given)  # noqa: E731
        yield cause(f"the shared expert {ranks} times", step(shared=times))
    yield cause("no expert bias in the router", step(ranking=lambda plain, scores, bias: scores))
    yield cause("the expert bias subtracted", step(ranking=lambda plain, scores, bias: scores - bias))
    yield cause("the expert bias in the probabilities", _bias_kept())
    yield cause("softmax scores in the router", step(scores=lambda plain, logits: logits.softmax(-1)))
    after = lambda plain, s, c: s.logit().softmax(-1) * (c.moe_router_topk_scaling_factor or 1)  # noqa: E731
    yield cause("a softmax over the selected experts", _weights(after))
    plainly = step(probabilities=after, ranking=lambda plain, scores, bias: scores)
    yield cause("a softmax over the selected experts, and no expert bias", plainly)
    raw = lambda plain, s, c: s * (c.moe_router_topk_scaling_factor or 1)  # noqa: E731
    yield cause("no normalisation of the selected scores", _weights(raw))
    rounded = step(scores=lambda plain, logits: plain(logits.bfloat16().float()))
    yield Cause("router logits rounded to BF16", "E", layer=rounded, rounds=True)
    for more, words in ((-1, "one expert fewer"), (1, "one expert more")):
        yield cause(f"{words} per token", _topk(more))
    for names, words in (
        (("fc1_latent", "fc2_latent"), "latent projections"),
        (("fc1_latent",), "first latent projection"),
        (("fc2_latent",), "second latent projection"),
    ):
        for way, of in ((-1, "previous"), (1, "next")):
            yield cause(f"the {words} of the {of} layer of experts", _latent_of(_neighbour(way), *names))
    for words, function in (
        ("ReLU", F.relu),
        ("SiLU", F.silu),
        ("GELU", F.gelu),
        ("a square without ReLU", torch.square),
    ):
        replaced = step(activation=lambda plain, x, f=function: f(x))
        yield cause(f"{words} instead of squared ReLU", replaced)
