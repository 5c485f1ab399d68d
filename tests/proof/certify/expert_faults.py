"""Faults of routers and experts: what is counted, balanced, dispatched and summed.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe.router import TopKRouter

from megatron_nemotron3.layers.latent_moe import CountingRouter
from tests.proof.certify.patching import in_place_of, then, wrap

FINALIZE = "megatron.core.distributed.finalize_model_grads"


def counts_of_one_rank() -> None:
    """The bias of the experts follows the tokens of the rank alone."""

    def alone(counts: Any, bias: Any, rate: float, tp_dp_cp_group: Any = None) -> Any:
        return bias + torch.sign(counts.mean(-1, keepdim=True) - counts) * rate

    in_place_of(FINALIZE, "get_updated_expert_bias", alone)


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


def balance_of_local_tokens() -> None:
    """The load-balancing loss takes the tokens of this rank for all of the sequence."""
    utils = "megatron.core.transformer.moe.moe_utils"
    in_place_of(utils, "reduce_from_tensor_model_parallel_region", lambda tensor, _group: tensor)


def dispatched_to_neighbor() -> None:
    """Received tokens are not sorted by expert, so they meet experts of other tokens."""

    def unsorted(pieces: Any, total: int) -> Any:
        order = torch.arange(total, device=pieces.device)
        return order, order

    in_place_of("megatron_nemotron3.layers.latent_moe", "order_by_expert", unsorted)


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
