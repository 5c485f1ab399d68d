"""Faults of routers and experts: what is counted, balanced, dispatched and summed.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_nemotron3.layers.latent_moe import AlltoAllTokenDispatcher, CountingRouter, LatentMoELayer
from tests.proof.certify.patching import in_place_of, then, wrap

FINALIZE = "megatron.core.distributed.finalize_model_grads"


def counts_of_one_rank() -> None:
    """The bias of the experts follows the tokens of the rank alone."""

    def alone(counts: Any, bias: Any, rate: float, tp_dp_cp_group: Any = None) -> Any:
        return bias + torch.sign(counts.mean(-1, keepdim=True) - counts) * rate

    in_place_of(FINALIZE, "get_updated_expert_bias", alone)


def counts_without_cp() -> None:
    """Tokens are counted over data-parallel ranks, not over context-parallel ones."""

    def make(update: Any) -> Any:
        def without(counts: Any, bias: Any, rate: float, tp_dp_cp_group: Any = None) -> Any:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=False)
            return update(counts, bias, rate, tp_dp_cp_group=group)

        return without

    wrap(FINALIZE, "get_updated_expert_bias", make)


def counts_of_last_microbatch() -> None:
    """The tokens of each micro-batch replace those of the micro-batches before."""

    def make(apply: Any) -> Any:
        def replaced(self: Any, *args: Any, **kwargs: Any) -> None:
            if torch.is_grad_enabled() and self.local_tokens_per_expert is not None:
                self.local_tokens_per_expert.zero_()
            apply(self, *args, **kwargs)

        return replaced

    wrap(CountingRouter, "_apply_expert_bias", make)


def counts_in_bf16() -> None:
    """Tokens are counted in BF16, where 256 + 1 is 256."""

    def rounded(router: Any) -> None:
        router.local_tokens_per_expert.data = router.local_tokens_per_expert.data.bfloat16()

    then(TopKRouter, "__init__", rounded)
    in_place_of(CountingRouter, "_maintain_float32_expert_bias", lambda self: None)

    def sum_in_bf16(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled():
            for row in routing_map:  # a token at a time, as a kernel with a BF16 accumulator does
                self.local_tokens_per_expert += row

    in_place_of(CountingRouter, "_apply_expert_bias", sum_in_bf16)


def balance_times_tp() -> None:
    """The load-balancing loss counts once for each tensor-parallel rank."""

    def make(attach: Any) -> Any:
        def repeated(self: Any, activation: Any, coefficient: Any, loss: Any, *args: Any, **kw: Any) -> Any:
            size = parallel_state.get_tensor_model_parallel_world_size()
            return attach(self, activation, coefficient, loss * size, *args, **kw)

        return repeated

    wrap(TopKRouter, "attach_and_log_load_balancing_loss", make)


def balance_of_local_tokens() -> None:
    """The load-balancing loss takes the tokens of this rank for all of the sequence."""
    utils = "megatron.core.transformer.moe.moe_utils"
    in_place_of(utils, "reduce_from_tensor_model_parallel_region", lambda tensor, _group: tensor)


def balance_not_averaged() -> None:
    """The load-balancing loss of every micro-batch counts whole instead of their mean."""

    def make(calculate: Any) -> Any:
        def whole(*args: Any, **kwargs: Any) -> Any:
            result = calculate(*args, **kwargs)
            MoEAuxLossAutoScaler.main_loss_backward_scale *= args[6]
            return result

        return whole

    wrap("megatron.core.pipeline_parallel.schedules", "forward_step_calc_loss", make)


def shared_expert_per_tp_rank() -> None:
    """The shared expert is added once for each tensor-parallel rank."""

    def make(compute: Any) -> Any:
        def repeated(self: Any, hidden: Any) -> Any:
            result = compute(self, hidden)
            size = parallel_state.get_tensor_model_parallel_world_size()
            return None if result is None else result * size

        return repeated

    wrap(LatentMoELayer, "shared_experts_compute", make)


def dispatched_to_neighbor() -> None:
    """Received tokens are not sorted by expert, so they meet experts of other tokens."""

    def unsorted(pieces: Any, total: int) -> Any:
        order = torch.arange(total, device=pieces.device)
        return order, order

    in_place_of("megatron_nemotron3.layers.latent_moe", "order_by_expert", unsorted)


def expert_parts_averaged() -> None:
    """Partial sums of experts cut over tensor-parallel ranks are averaged instead of summed."""

    def make(scatter: Any) -> Any:
        def averaged(tensor: Any, group: Any = None, **kwargs: Any) -> Any:
            return scatter(tensor, group=group, **kwargs) / group.size()

        return averaged

    wrap("megatron.core.transformer.moe.token_dispatcher", "reduce_scatter_to_sequence_parallel_region", make)


def probabilities_of_other_experts() -> None:
    """Tokens come back from other ranks weighed with probabilities in another order."""

    def make(postprocess: Any) -> Any:
        def mixed(self: Any, tokens: Any, probabilities: Any) -> Any:
            tokens, counts, probabilities = postprocess(self, tokens, probabilities)
            return tokens, counts, probabilities.roll(1) if self.ep_size > 1 else probabilities

        return mixed

    wrap(AlltoAllTokenDispatcher, "dispatch_postprocess", make)


def recompute_routes_anew() -> None:
    """The recomputed forward pass of an MoE layer chooses other experts than the first one did."""
    recomputing = [False]

    def backward(original: Any) -> Any:
        def flagged(ctx: Any, *args: Any) -> Any:
            recomputing[0] = True
            try:
                return original(ctx, *args)
            finally:
                recomputing[0] = False

        return flagged

    def routing(original: Any) -> Any:
        def other(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, logits.roll(1, -1) if recomputing[0] else logits, *args, **kwargs)

        return other

    wrap(CheckpointFunction, "backward", backward)
    wrap(CountingRouter, "routing", routing)
