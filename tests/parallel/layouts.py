"""Which models and layouts are compared with one process: the rows of a table in docs/measurements.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from tests.parallel.case import Case

PER_TOKEN = "--calculate-per-token-loss"


def small(name: str, pattern: str) -> Nemotron3Config:
    """The tiny form of a catalog model, smaller still: eight layers, eight experts."""
    config = tiny(get(name)).but(pattern=pattern, vocab_size=128, seq_length=64, max_position_embeddings=64)
    return config.but(num_moe_experts=8, moe_router_topk=2) if config.is_moe else config


#: Super: latent experts, shared expert, MTP applied twice. Nano: experts at full width, no MTP, and the loss
#: its published launch has, a mean over the tokens of each micro-batch. Dense: no experts at all.
CASES: dict[str, Case] = {
    "super": Case(config=small("super", "MEM*EME*")),
    "nano": Case(config=small("nano", "MEM*EME*")),
    "dense": Case(config=small("nemotron-h-8b", "M-M*-M-*")),
}


@dataclass(frozen=True)
class Layout:
    """A way to spread a model, and the options that go with it."""

    sizes: ParallelLayout
    extra: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    #: Runs in `make test`, with these models; the others in `make test-full`.
    quick: tuple[str, ...] = ()
    #: Models it makes sense for.
    models: tuple[str, ...] = ("super", "nano", "dense")
    #: What of `Case` differs; the reference runs with the same.
    mask: str | None = None
    per_token: bool = False


_L = ParallelLayout
_MOE = ("super", "nano")
_ALLGATHER = ("--moe-token-dispatcher-type", "allgather")

LAYOUTS: dict[str, Layout] = {
    "TP2 SP": Layout(_L(tp=2)),
    "TP2": Layout(_L(tp=2, sp=False), models=("dense",)),
    "TP4 SP": Layout(_L(tp=4)),
    "EP2 alltoall": Layout(_L(dp=2, ep=2), models=_MOE),
    "EP2 allgather": Layout(_L(dp=2, ep=2), _ALLGATHER, models=_MOE),
    "EP4 alltoall": Layout(_L(dp=4, ep=4), models=_MOE),
    "EP4 allgather": Layout(_L(dp=4, ep=4), _ALLGATHER, models=_MOE),
    "TP2 SP, expert TP2, alltoall": Layout(_L(tp=2, etp=2), models=_MOE),
    "TP2 SP, expert TP2, allgather": Layout(_L(tp=2, etp=2), _ALLGATHER, models=_MOE),
    "TP2 SP EP2, expert TP2": Layout(_L(tp=2, dp=2, ep=2, etp=2), quick=("super",), models=_MOE),
    "TP2 SP EP2 alltoall": Layout(_L(tp=2, ep=2), models=_MOE),
    "TP2 SP EP2 allgather": Layout(_L(tp=2, ep=2), _ALLGATHER, models=_MOE),
    "TP2 SP EP4 DP2": Layout(_L(tp=2, ep=4, dp=2), models=_MOE),
    "PP2": Layout(_L(pp=2)),
    "PP4": Layout(_L(pp=4)),
    "PP2 VPP2": Layout(_L(pp=2, vpp=2), quick=("super",)),
    "PP2 VPP4": Layout(_L(pp=2, vpp=4)),
    "DP2": Layout(_L(dp=2), without=("--use-distributed-optimizer",)),
    "DP2 distributed optimizer": Layout(_L(dp=2)),
    "DP2 distributed optimizer, overlapped": Layout(
        _L(dp=2), ("--overlap-grad-reduce", "--overlap-param-gather")
    ),
    "CP2": Layout(_L(cp=2), quick=("super",), per_token=True),
    "CP4": Layout(_L(cp=4), per_token=True),
    "CP2, mean loss": Layout(_L(cp=2), models=("nano", "dense"), mask="none"),
    "CP2 TP2 SP": Layout(_L(cp=2, tp=2), per_token=True),
    "CP2 PP2": Layout(_L(cp=2, pp=2), models=("super",)),
    "CP2 EP2": Layout(_L(cp=2, ep=2), models=_MOE, per_token=True),
    "TP2 SP PP2": Layout(_L(tp=2, pp=2)),
    "PP2 EP2": Layout(_L(pp=2, dp=2, ep=2), models=_MOE),
    "TP2 SP PP2 EP2": Layout(_L(tp=2, pp=2, ep=2), models=_MOE),
    "TP2 SP PP2 DP2": Layout(_L(tp=2, pp=2, dp=2)),
}


def cases(model: str, row: Layout) -> tuple[Case, Case]:
    """(on one rank, in the layout) of a row of the table."""
    changes: dict[str, Any] = {"mask": row.mask} if row.mask else {}
    case = replace(CASES[model], **changes)
    if row.per_token and not case.config.has_mtp:  # with MTP it is among the flags
        case = replace(case, extra=(*case.extra, PER_TOKEN))
    return case, case.at(row.sizes, *row.extra, without=row.without)
