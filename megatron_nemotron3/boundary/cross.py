"""A crossing between modules that share ranks, in autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.boundary import alltoall
from megatron_nemotron3.boundary.failure import Failure
from megatron_nemotron3.boundary.groups import Groups
from megatron_nemotron3.boundary.transfer import Plan


class Route:
    """One modality of one microbatch, there and back."""

    def __init__(self, forward: Plan) -> None:
        self.forward = forward

    @cached_property
    def backward(self) -> Plan:
        """The transposed plan: to each rank that gave rows, one copy of their gradients."""
        return self.forward.transposed()


class Cross(torch.autograd.Function):
    """Rows forward by the plans, gradients back by the transposed ones, all modalities together."""

    @staticmethod
    def forward(
        ctx: Any,
        groups: Groups,
        failure: Failure,
        routes: Sequence[Route],
        back: Sequence[bool],
        anchor: Tensor,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """Args after the context: the ranks' groups and common end; routes; of each modality, whether its
        gradients cross, the same on all ranks; a tensor that requires a gradient if any do; the rows."""
        ctx.groups, ctx.failure, ctx.routes, ctx.back = groups, failure, routes, back
        plans = [route.forward for route in routes]
        with failure.guarded(lambda: _doing(plans, groups.rank, "rows")):
            arrived = tuple(alltoall.deliver(plans, rows, groups))
        ctx.mark_non_differentiable(*(out for out, need in zip(arrived, back, strict=True) if not need))
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chosen = [i for i, need in enumerate(ctx.back) if need]
        plans = [ctx.routes[i].backward for i in chosen]
        with ctx.failure.guarded(lambda: _doing(plans, ctx.groups.rank, "gradients of rows")):
            returned = alltoall.deliver(plans, [grads[i].contiguous() for i in chosen], ctx.groups)
        given: list[Tensor | None] = [None] * len(ctx.back)
        for i, grad in zip(chosen, returned, strict=True):
            given[i] = grad
        return None, None, None, None, None, *given


def _doing(plans: Sequence[Plan], rank: int, what: str) -> str:
    held = [plan.rows_held(rank) for plan in plans]
    wanted = [plan.rows_wanted(rank) for plan in plans]
    return f"all-to-all of {what}: holds {held}, wants {wanted} of each modality"
