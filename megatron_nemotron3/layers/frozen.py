"""Frozen routers: the biases by which they choose experts are no parameters, and move by counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.router import TopKRouter

from megatron_nemotron3.common.hooks import at_first_forward


def freeze_biases(model: Any) -> None:
    """Leave the biases of all routers of a model as they are."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.frozen_expert_bias = True


def name_moving_biases(announce: Callable[[str], None]) -> None:
    """Say when the first forward of a model begins if biases of frozen routers will move."""

    def look(model: Any) -> None:
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        moving = sum(_moves(router) and not router.weight.requires_grad for router in routers)
        if moving:
            announce(
                f"warning: {moving} routers are frozen, but the biases by which they choose experts move in "
                "every step: pass --moe-router-bias-update-rate 0, or set their frozen_expert_bias"
            )

    at_first_forward(HybridModel, look)


def _moves(router: Any) -> bool:
    """Whether Megatron's step moves the bias of a router."""
    has_bias = router.expert_bias is not None and router.config.moe_router_bias_update_rate
    return bool(has_bias and router.training and not router.frozen_expert_bias)
