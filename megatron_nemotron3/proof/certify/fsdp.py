"""Whole tensors of a model that Megatron-FSDP has divided over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.proof.certify.tensors import Pieces, pieces


def weights(chunk: Any) -> Pieces:
    """Copies of the weights that the optimizer holds, and of all buffers."""
    return _assembled(chunk, lambda buffer, name, weight: weight)


def gradients(chunk: Any) -> Pieces:
    """Copies of the gradients that the optimizer gets, cut and named as the weights are."""
    found = _assembled(chunk, lambda buffer, name, weight: buffer.dist_main_grad[name])
    return [piece for piece in found if not piece[0].endswith("expert_bias")]


def _assembled(chunk: Any, shard: Callable[[Any, str, Any], Any]) -> Pieces:
    """`pieces` of the model inside, its parameters replaced by what `shard` gives for each, assembled."""
    buffer, fsdp = chunk.param_and_grad_buffer, chunk.module
    whole = {}
    for name, weight in buffer.optimizer_named_parameters:
        group = buffer.parameter_groups[buffer.param_to_param_group[weight.orig_param]]
        ranks = group.main_grad_buffer.data_parallel_group
        parts = [torch.empty(0)] * ranks.size()
        local = shard(buffer, name, weight).to_local().detach().flatten()
        torch.distributed.all_gather_object(parts, local, group=ranks)
        whole[name] = torch.cat(parts).view(weight.orig_param.shape)
    fsdp._replace_param_with_raw_if_needed()
    fsdp.is_param_fsdp_distributed = True  # else its hook on state_dict replaces them again
    parameters = dict(unwrapped(chunk).named_parameters())
    values = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = whole[name]
        return pieces([chunk])
    finally:
        for name, p in parameters.items():
            p.data = values[name]
        fsdp.is_param_fsdp_distributed = False
        fsdp._replace_param_with_distributed_if_needed()
