"""Faults of what a launch computes in its own precision, from its own initialization.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.proof.certify.patching import arguments, in_place_of, then, wrap

_SEED = ("megatron.core.tensor_parallel", "model_parallel_cuda_manual_seed")


def one_master_not_copied() -> None:
    """After a step the model keeps the old value of one parameter; only its master weight moves."""

    def make(copy: Any) -> Any:
        def partly(optimizer: Any) -> None:
            one = optimizer.shard_float16_groups[0][-1]
            before = one.clone()
            copy(optimizer)
            one.copy_(before)

        return torch.no_grad()(partly)

    wrap(DistributedOptimizer, "_copy_main_params_to_model_params", make)


def masters_truncated() -> None:
    """Master weights become BF16 by leaving out bits instead of rounding."""

    @torch.no_grad()
    def truncate(optimizer: Any) -> None:
        for masters, models in zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups):
            for master, model in zip(masters, models):
                model.copy_((master.view(torch.int32) & -65536).view(torch.float32))

    then(Float16OptimizerWithFloat16Params, "_copy_main_params_to_model_params", truncate)


def tensor_ranks_seeded_alike() -> None:
    """All tensor-parallel ranks draw from one seed, so their parts of a matrix begin alike."""
    arguments(*_SEED, tp_rank=0)


def expert_ranks_seeded_alike() -> None:
    """All expert-parallel ranks draw from one seed, so their experts begin alike."""
    arguments(*_SEED, ep_rank=0)


def routers_drawn_apart() -> None:
    """Each tensor-parallel rank draws another router, though all hold the same one."""

    @torch.no_grad()
    def draw(router: Any) -> None:
        router.weight.add_(0.001 * torch.distributed.get_rank())

    then(Router, "reset_parameters", draw)


def outputs_not_scaled() -> None:
    """Matrices that end a layer begin as large as all others."""

    def equal(config: Any) -> None:
        config.output_layer_init_method = config.init_method

    then(TransformerConfig, "__post_init__", equal)


def narrow_decays() -> None:
    """Mamba's A is drawn between 1 and 2."""
    in_place_of("megatron_nemotron3.layers.mamba", "A_INIT_RANGE", (1, 2))


def biases_in_bf16() -> None:
    """The expert biases are BF16, in which an update of 0.001 is lost beside a bias of 1."""
    in_place_of(TopKRouter, "_maintain_float32_expert_bias", lambda router: None)


def routers_in_bf16() -> None:
    """`--moe-router-dtype` is ignored."""

    def ignore(config: Any) -> None:
        config.moe_router_dtype = None

    then(TransformerConfig, "__post_init__", ignore)


def gradients_summed_in_bf16() -> None:
    """Gradients of micro-batches and ranks are summed in BF16."""

    def make(config_of: Any) -> Any:
        def narrow(*given: Any, **named: Any) -> Any:
            config = config_of(*given, **named)
            config.grad_reduce_in_fp32 = False
            return config

        return narrow

    wrap("megatron.training.training", "get_megatron_ddp_config", make)


def experts_step_twice() -> None:
    """Adam counts two steps for one where a parameter is an expert's, and corrects its moments too little."""

    def count(optimizer: Any) -> None:
        for masters, models in zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups):
            for master, model in zip(masters, models):
                if not getattr(model, "allreduce", True):
                    optimizer.optimizer.state[master]["step"] += 1

    then(Float16OptimizerWithFloat16Params, "step_with_ready_grads", count)
