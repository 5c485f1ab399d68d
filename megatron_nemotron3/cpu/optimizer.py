"""Adam, the norm and the scaling of gradients on a CPU: one call of torch for all parameters.

Megatron's own fallbacks loop over the parameters, of which a model has one for each expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def adam(params: Any, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """Return torch's Adam, or with `adam_w_mode` AdamW, built with the arguments of apex's FusedAdam.

    It is torch's fused form where it has one: not for the sharded parameters of Megatron-FSDP.
    """
    import torch
    from torch.distributed.tensor import DTensor

    def choose(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["fused"] = not any(isinstance(parameter, DTensor) for parameter in group["params"])

    optimizer = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **options)
    choose(optimizer)
    # A checkpoint replaces the groups, by those of another device or an earlier version.
    optimizer.register_load_state_dict_post_hook(choose)
    return optimizer


def norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, [1] in FP32, with the arguments of apex's `multi_tensor_l2norm`."""
    import torch

    norms = [n.float() for tensors in lists for n in torch._foreach_norm(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Write the first list's tensors times `factor` into the second's, as apex's `multi_tensor_scale`."""
    import torch

    source, target = lists
    if all(a is b for a, b in zip(source, target, strict=True)):
        torch._foreach_mul_(target, factor)
    else:
        torch._foreach_copy_(target, source if factor == 1 else torch._foreach_mul(source, factor))
