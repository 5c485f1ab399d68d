"""What MXFP8 and NVFP4 change in memory with Transformer Engine: derived from its modules, not measured.

A quantized linear keeps its input for the weight gradient packed (one copy, along the other axis) in place of
BF16, and packed copies of its weight along both axes from the first microbatch of a step to the next step.
Layers of the BF16 tail keep BF16; a kind's layers are taken alike, at their mean. Standard library only.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import rows_of, symbol_sizes
from megatron_nemotron3.plan.activation_forms import Form, Share
from megatron_nemotron3.plan.state import held_elements
from megatron_nemotron3.precision.table import BF16, LINEARS, MXFP8, NVFP4, kind_named, tail

#: Bytes of an element with its share of the block's scale (32 to an E8M0, 16 to an E4M3).
PACKED = {BF16: 2.0, MXFP8: 1 + 1 / 32, NVFP4: 1 / 2 + 1 / 16}


@lru_cache(maxsize=1024)
def quantized_share(config: Nemotron3Config, layer: str) -> float:
    """How much of the decoder's layers of kind `layer` is outside the BF16 tail: 0 to 1."""
    layers = config.pattern.count(layer)
    body = config.pattern[: config.num_layers - tail(config).layers]
    return body.count(layer) / layers if layers else 0.0


@lru_cache(maxsize=1024)
def bytes_by_linear(config: Nemotron3Config, precision: str) -> dict[str, float]:
    """Row of the precision table -> mean bytes of a packed element over the decoder's layers that have it."""
    if precision not in (MXFP8, NVFP4):
        return {}
    found = {}
    for kind in LINEARS:
        format = kind.format(precision)
        if kind.layer and kind.layer in config.pattern and format != BF16:
            share = quantized_share(config, kind.layer)
            found[kind.name] = share * PACKED[format] + (1 - share) * PACKED[BF16]
    return found


def saved_less(config: Nemotron3Config, at: Share, kind: str, precision: str) -> Form:
    """Part of a layer's form -> bytes that packing spares (negative: adds)."""
    if not at.te or at.element != PACKED[BF16]:
        return {}
    sizes = bytes_by_linear(config, precision)
    found: Form = {}
    for part, linear, bf16, kept in _inputs(config, at, kind):
        if linear in sizes:
            packed = bf16 * sizes[linear] / PACKED[BF16]
            # BF16 that another module keeps anyway stays, and the packed copy comes on top.
            found[part] = found.get(part, 0) + round((0 if kept else bf16) - packed)
    return found


def _inputs(config: Nemotron3Config, at: Share, kind: str) -> tuple[tuple[str, str, int, bool], ...]:
    """(part, row of the precision table, bytes in BF16, whether BF16 is kept besides) of linears' inputs."""
    stream = at.stream(config.hidden_size)
    if kind == "M":
        inner = at.inner(config.mamba_inner_size // at.tp)
        return (("in_proj", "mamba_in", stream, False), ("out_proj", "mamba_out", inner, False))
    if kind == "*":
        heads = at.inner(config.num_attention_heads * config.kv_channels // at.tp)
        return (("linear_qkv", "attention", stream, False), ("linear_proj", "attention", heads, False))
    if kind == "-":
        hidden = at.inner((config.dense_ffn_hidden_size or 0) // at.tp)
        return (("linear_fc1", "mlp", stream, False), ("linear_fc2", "mlp", hidden, False))
    if kind == "E":
        rows = round(at.shard * (config.moe_router_topk or 0) * at.etp * at.imbalance) * at.element
        shared = at.inner((config.moe_shared_expert_intermediate_size or 0) // at.tp)
        return (
            ("experts", "experts", rows * config.expert_input_size, False),
            ("activation", "experts", rows * (config.moe_ffn_hidden_size or 0) // at.etp, False),
            ("shared_experts", "shared_experts", stream, True),  # the router keeps the norm's output
            ("shared_experts", "shared_experts", shared, False),
        )
    return ()


@lru_cache(maxsize=4096)
def weight_copies(config: Nemotron3Config, kind: str, precision: str, tp: int, etp: int, ep: int) -> int:
    """Bytes of the packed copies of one layer's weights on a rank, both axes."""
    sizes = bytes_by_linear(config, precision)
    layout = ParallelLayout(tp=tp, etp=etp, ep=ep)
    total = 0.0
    for row in rows_of(config, kind):
        linear = kind_named(row.linear)
        if linear is not None and linear.name in sizes:
            elements, copies, _ = held_elements(row, layout, symbol_sizes(config))
            total += 2 * PACKED[linear.format(precision)] * elements * copies
    return round(total * quantized_share(config, kind))
