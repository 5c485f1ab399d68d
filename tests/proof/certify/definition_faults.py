"""Faults that every layout has, one process among them: no comparison of layouts can find them.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_nemotron3.layers import chunked_scan, mamba
from megatron_nemotron3.layers.mtp import MTPLayer
from tests.proof.certify.patching import arguments, in_place_of, result, then, wrap

MTP = "megatron.core.transformer.multi_token_prediction"
ROUTER = "megatron.core.transformer.moe.router"
FINALIZE = "megatron.core.distributed.finalize_model_grads"


def shared_expert_twice() -> None:
    """The shared expert is added twice."""

    result(MoELayer, "shared_experts_compute", lambda output: None if output is None else 2 * output)


def state_lost_between_chunks() -> None:
    """The scan of a Mamba layer begins anew with every chunk of 64 tokens."""

    def forget(decays: Any) -> Any:
        nothing = torch.zeros_like(decays.reach_in)
        return replace(decays, reach_in=nothing, carry=nothing[:, -1])

    result(chunked_scan, "_decays", forget)


def crowded_expert_drops() -> None:
    """An expert does not compute the last of its tokens if it has more than twice the mean."""

    def make(route: Any) -> Any:
        def dropping(*args: Any, **kwargs: Any) -> Any:
            probabilities, chosen = route(*args, **kwargs)
            counts = chosen.sum(0)
            crowded = counts > 2 * counts.float().mean()
            last = (chosen.long().cumsum(0) == counts) & chosen.bool() & crowded
            return probabilities.masked_fill(last, 0.0), chosen

        return dropping

    wrap(ROUTER, "topk_routing_with_score_function", make)


def small_gradients_are_scaled_up() -> None:
    """Gradients below the clip are scaled to it."""

    def make(clip: Any) -> Any:
        def always(parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any) -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(max_norm / (total_norm + 1e-6))

        return always

    wrap("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", make)


def mtp_weighs_twice() -> None:
    """The gradient of MTP's losses is that of their sum over two depths, not of their mean."""
    wrap(MTPLossAutoScaler, "set_loss_scale", lambda set_scale: lambda scale: set_scale(2 * scale))


def megatrons_z_loss() -> None:
    """The z-loss of a repeated MTP block counts once per depth, as Megatron 0.19 and main have it."""
    in_place_of("megatron_nemotron3.layers.mtp", "_count_losses_once", lambda *_: None)


def balance_weighs_twice() -> None:
    """The gradient of the load-balancing loss counts every call of MTP's block."""
    wrap(MoEAuxLossAutoScaler, "set_loss_scale", lambda set_scale: lambda scale: set_scale(2 * scale))


def mtp_is_no_mtp() -> None:
    """Routers do not know that they belong to MTP: their load-balancing loss counts once per depth."""

    def unaware(layer: Any) -> None:
        for module in layer.modules():
            if isinstance(module, (TopKRouter, BaseMoELayer)):
                module.is_mtp_layer = False

    then(MTPLayer, "__init__", unaware)


def tokens_of_two_microbatches() -> None:
    """Gradients of three micro-batches are divided by the tokens of two."""
    wrap(DistributedDataParallel, "scale_gradients", lambda scale: lambda self, n: scale(self, 1.5 * n))


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


def experts_counted_in_a_byte() -> None:
    """The number of an expert has 8 bits, so tokens of expert 256 go to expert 0."""

    def fold(routed: Any) -> Any:
        shares, chosen = routed
        count = chosen.shape[-1]
        if count <= 256:
            return routed
        places = torch.arange(count) % 256
        folded = torch.zeros_like(shares).index_add(-1, places, shares)
        return folded, torch.zeros_like(shares).index_add(-1, places, chosen.to(shares.dtype)).bool()

    result(TopKRouter, "routing", fold)


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
    result("megatron.core.optimizer.optimizer", "get_grad_norm_fp32", lambda norm: 2**0.5 * norm)


def mamba_ignores_borders() -> None:
    """The state of Mamba goes from one document into the next."""
    in_place_of(mamba, "seq_idx_from_cu_seqlens", lambda *args: None)


def mtp_ignores_borders() -> None:
    """MTP's targets come from the next document."""
    arguments(MTP, "roll_tensor", packed_seq_params=None)
