"""Stages `step` of gpu.py: forward and backward of a stack of published width, for one side.

The models have the widths of Nano and Super and the first 8 to 12 layers of their patterns (the length whose
shares of M, * and E are closest to the published ones). BF16, 8,192 tokens, micro-batch 1, no optimizer.
Loss, logits and gradients come first, as sketches that can be compared with those of other sides; then time,
memory and host waits; last the operations that take most of the time.
"""

from __future__ import annotations

from typing import Any

from gpu_model import fitting, flops_per_token, stack
from gpu_setting import Setting

TOKENS, SMALL_TOKENS = 8192, 48
#: Tokens for which logits and gradients are compared.
COMPARED_TOKENS = 1024
STEPS, SMALL_STEPS = 8, 1
#: Operations of the profile.
OPERATIONS = 20


def run(setting: Setting, width: str, side: str) -> None:
    """Measure one side at one width."""
    from gpu_sides import SIDES

    made = SIDES[side](setting.device)
    config = stack(width, tiny=setting.small)
    fitted = config if setting.small else fitting(config, made.capacity())
    tokens = SMALL_TOKENS if setting.small else TOKENS
    setting.emit("model", **description(config, fitted, tokens))
    setting.emit("settings", text=made.build(fitted))
    setting.emit("parity", **made.parity(min(tokens, COMPARED_TOKENS)))
    setting.emit("speed", **made.measure(tokens, SMALL_STEPS if setting.small else STEPS))
    setting.emit("profile", operations=made.profile(tokens, OPERATIONS))


def description(config: Any, fitted: Any, tokens: int) -> dict[str, Any]:
    """The model that is measured, with its model FLOPs."""
    from megatron_nemotron3.models.parameters import count

    return {
        "title": fitted.title,
        "pattern": fitted.pattern,
        "experts": fitted.num_moe_experts,
        "published_experts": config.num_moe_experts,
        "topk": fitted.moe_router_topk,
        "parameters": count(fitted).stored,
        "tokens": tokens,
        "flops_per_token": sum(flops_per_token(fitted, tokens).values()),
    }
