"""Knowledge distillation through nvidia-modelopt: the student's forward pass also runs the teacher."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_nemotron3.compression.plugin import modelopt_problem


def distillation_model(student: HybridModel, teacher: HybridModel, **settings: Any) -> HybridModel:
    """Convert the student in place to modelopt's `DistillationModel`, which holds the frozen teacher.

    A call with labels runs both; `distillation_loss` then returns the loss. `state_dict` and
    `sharded_state_dict` contain the student only.

    Args:
        student, teacher: HybridModels of any two configs with the same vocabulary and tensor-parallel size.
        settings: fields of modelopt's `DistillationConfig`: `skip_lm_loss` (default True: KL divergence of
            the logits only), `kd_loss_scale`, `logit_kl_temperature`, `logit_kl_topk`,
            `intermediate_layer_pairs`.

    Raises:
        ImportError: modelopt is missing; the message has the pip line.
    """
    if (problem := modelopt_problem()) is not None:
        raise ImportError(problem)
    from modelopt.torch import distill
    from modelopt.torch.distill.plugins import megatron as plugin

    config = plugin.setup_distillation_config(
        plugin.DistillationConfig(**settings), student.config, teacher.config
    )
    options = {
        "teacher_model": teacher,
        "criterion": config.criterion,
        "loss_balancer": config.loss_balancer,
    }
    model = distill.convert(student, mode=[("kd_loss", options)])
    plugin.adjust_distillation_model_for_mcore(model, config)
    return model


def distillation_loss(model: HybridModel, token_losses: torch.Tensor) -> torch.Tensor:
    """The loss to minimize after a forward pass of a `distillation_model` in training mode.

    Args:
        token_losses: [b, s] that the model returned for its labels.

    Returns:
        Mean over tokens (a scalar, nats): with the default settings KL(teacher || student).
    """
    losses = model.compute_kd_loss(
        student_loss=token_losses.mean(),
        # Each loss comes as (per-token [b, s], two flags on tensor parallelism).
        loss_reduction_fn=lambda loss: loss[0].float().mean(),
    )
    total: torch.Tensor = losses["kd_loss"]
    return total
