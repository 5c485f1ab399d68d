"""Faults that every layout has, one process among them: no comparison of layouts can find them.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_nemotron3.layers import mamba
from megatron_nemotron3.layers.mtp import MTPLayer
from tests.proof.certify.patching import in_place_of, wrap

MTP = "megatron.core.transformer.multi_token_prediction"
ROUTER = "megatron.core.transformer.moe.router"
FINALIZE = "megatron.core.distributed.finalize_model_grads"


def shared_expert_twice() -> None:
    """The shared expert is added twice."""

    def make(compute: Any) -> Any:
        def twice(self: Any, hidden: Any) -> Any:
            output = compute(self, hidden)
            return None if output is None else 2 * output

        return twice

    wrap(MoELayer, "shared_experts_compute", make)


def _larger(scaler: Any, factor: float) -> None:
    def make(set_scale: Any) -> Any:
        return lambda scale: set_scale(scale * factor)

    wrap(scaler, "set_loss_scale", make)


def mtp_weighs_twice() -> None:
    """The gradient of MTP's losses is that of their sum over two depths, not of their mean."""
    _larger(MTPLossAutoScaler, 2.0)


def megatrons_z_loss() -> None:
    """The z-loss of a repeated MTP block counts once per depth, as Megatron 0.19 and main have it."""
    in_place_of("megatron_nemotron3.layers.mtp", "_count_z_loss_once", lambda router: None)


def mtp_is_no_mtp() -> None:
    """Routers do not know that they belong to MTP: their load-balancing loss counts once per depth."""

    def make(init: Any) -> Any:
        def unaware(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            for module in self.modules():
                if isinstance(module, (TopKRouter, BaseMoELayer)):
                    module.is_mtp_layer = False

        return unaware

    wrap(MTPLayer, "__init__", make)


def tokens_of_two_microbatches() -> None:
    """Gradients of three micro-batches are divided by the tokens of two."""

    def make(scale: Any) -> Any:
        return lambda self, factor: scale(self, factor * 1.5)

    wrap(DistributedDataParallel, "scale_gradients", make)


def bias_weighs() -> None:
    """The expert bias is part of an expert's weight, not only of its choice."""

    def make(route: Any) -> Any:
        def biased(logits: Any, *args: Any, **kwargs: Any) -> Any:
            bias = kwargs.pop("expert_bias")
            return route(logits if bias is None else logits + bias, *args, expert_bias=None, **kwargs)

        return biased

    wrap(ROUTER, "topk_routing_with_score_function", make)


def bias_does_not_choose() -> None:
    """The expert bias is ignored."""

    def make(route: Any) -> Any:
        def unbiased(*args: Any, **kwargs: Any) -> Any:
            kwargs["expert_bias"] = torch.zeros_like(kwargs["expert_bias"])
            return route(*args, **kwargs)

        return unbiased

    wrap(ROUTER, "topk_routing_with_score_function", make)


def bias_moves_the_wrong_way() -> None:
    """An expert with too many tokens gets more."""

    def wrong(counts: Any, bias: Any, rate: float, tp_dp_cp_group: Any = None) -> Any:
        return bias - torch.sign(counts.float().mean(-1, keepdim=True) - counts) * rate

    in_place_of(FINALIZE, "get_updated_expert_bias", wrong)


def everything_decays() -> None:
    """Gains, A, D and dt decay, too."""

    def make(step: Any) -> Any:
        def alike(self: Any, *args: Any, **kwargs: Any) -> None:
            for group in self.optimizer.param_groups:
                group["wd_mult"] = 1.0
            step(self, *args, **kwargs)

        return alike

    wrap(OptimizerParamScheduler, "step", make)


def norm_counts_twice() -> None:
    """The squares of all gradients enter their norm twice."""

    def make(norm: Any) -> Any:
        return lambda *args, **kwargs: 2**0.5 * norm(*args, **kwargs)

    wrap("megatron.core.optimizer.optimizer", "get_grad_norm_fp32", make)


def mamba_ignores_borders() -> None:
    """The state of Mamba goes from one document into the next."""
    in_place_of(mamba, "seq_idx_from_cu_seqlens", lambda *args: None)


def mtp_ignores_borders() -> None:
    """MTP's targets come from the next document."""

    def make(roll: Any) -> Any:
        def whole(*args: Any, **kwargs: Any) -> Any:
            return roll(*args, **(kwargs | {"packed_seq_params": None}))

        return whole

    wrap(MTP, "roll_tensor", make)
