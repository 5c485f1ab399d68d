"""Models for a GPU: stacks of published width with a few layers, and their model FLOPs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import GIB

if TYPE_CHECKING:
    from megatron_nemotron3.models import Nemotron3Config

#: Layers of a shortened stack: enough for every kind, few enough for one GPU.
LAYERS = range(8, 13)
#: Bytes per parameter and gradient in BF16, and a reserve for activations and logits.
BYTES_PER_PARAMETER = 4
RESERVE = 40 * GIB


def cut(pattern: str) -> str:
    """The first 8 to 12 layers of a pattern: the length whose shares of M, * and E are closest to its own."""

    def distance(size: int) -> float:
        head = pattern[:size]
        return sum(abs(head.count(k) / size - pattern.count(k) / len(pattern)) for k in set(pattern))

    return pattern[: min(LAYERS, key=distance)]


def stack(name: str, *, tiny: bool = False) -> Nemotron3Config:
    """The catalog model `name` without MTP, with a few layers (`cut`); or its whole tiny form."""
    from megatron_nemotron3.models import get
    from megatron_nemotron3.models import tiny as make_tiny

    config = get(name).but(mtp_pattern=None, mtp_num_layers=0)
    return make_tiny(config) if tiny else config.but(pattern=cut(config.pattern))


def capacity(device: str) -> int:
    """Memory of the device in bytes."""
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fitting(config: Nemotron3Config, memory: int) -> Nemotron3Config:
    """`halved` for a training step: weights, gradients and `RESERVE` fit in `memory` bytes."""
    from megatron_nemotron3.models.parameters import count

    return halved(config, lambda c: BYTES_PER_PARAMETER * count(c).stored + RESERVE, memory)


def data_sheet(device: str) -> float | None:
    """TFLOP/s of dense BF16 products by the data sheet; None for a device that the plan does not know."""
    import torch

    from megatron_nemotron3.launch.plan.hardware import GPUS

    words = torch.cuda.get_device_name().lower().split() if device == "cuda" else []
    return next((gpu.bf16 / 1e12 for name, gpu in GPUS.items() if name in words), None)


def described(config: Nemotron3Config, published: Nemotron3Config, tokens: int) -> str:
    """A line about the model of a step."""
    from megatron_nemotron3.models.parameters import count

    return (
        f"{config.title}: layers {config.pattern}, {config.num_moe_experts} of {published.num_moe_experts} "
        f"experts, top-{config.moe_router_topk}, {count(config).stored / 1e9:.3g}B parameters, {tokens:,} "
        f"tokens, {sum(flops_per_token(config, tokens).values()) / 1e9:,.3g} GFLOP per token; BF16, forward "
        "and backward, no optimizer"
    )


def halved(config: Nemotron3Config, needed: Callable[[Nemotron3Config], int], memory: int) -> Nemotron3Config:
    """Halve the routed experts of `config` until `needed` bytes are at most `memory`.

    Raises:
        ValueError: it does not fit with twice as many experts as a token selects.
    """
    while (need := needed(config)) > memory:
        experts, topk = config.num_moe_experts or 0, config.moe_router_topk or 0
        if experts // 2 < 2 * topk:
            raise ValueError(
                f"{config.title} with {experts} experts needs {need / GIB:.0f} GiB, "
                f"the device has {memory / GIB:.0f}: use a larger device"
            )
        config = config.but(num_moe_experts=experts // 2)
    return config


def flops_per_token(config: Nemotron3Config, tokens: int) -> dict[str, float]:
    """Model FLOPs of one token in forward and backward, by term, for sequences of `tokens`.

    matmul     6 per parameter of every matrix that multiplies the token: a multiply-add is 2, and backward
               has one product for the input and one for the weight (arXiv 2001.08361, section 2.1). k of N
               routed experts count, the router and the output layer count once, the embedding does not.
    attention  QK^T and PV over the s / 2 keys a token sees on average: 3 * 2 * 2 * (s / 2) * heads * c.
    scan       3 * 7 * inner * state: the recurrence of Mamba-2, as Megatron-LM 0.19 counts it
               (`num_floating_point_operations` in megatron/training/training.py). A chunked scan executes
               more FLOPs, which are not model FLOPs.

    Norms, activations, the convolution and recomputation are not counted. For Super the sum is Megatron's
    plus the router; Megatron assumes an inner width of 2 * hidden for Mamba, which does not hold for Nano
    (64 heads of 64 at hidden size 2688).
    """
    from megatron_nemotron3.models.parameters import layer_tensors

    matrices = config.vocab_size * config.hidden_size
    for kind in config.pattern:
        matrices += sum(t.active_elements for t in layer_tensors(config, kind) if len(t.shape) == 2)
    attention = 6 * tokens * config.num_attention_heads * config.kv_channels
    scan = 21 * config.mamba_inner_size * config.mamba_state_dim
    return {
        "matmul": 6.0 * matrices,
        "attention": float(attention * config.pattern.count("*")),
        "scan": float(scan * config.pattern.count("M")),
    }
