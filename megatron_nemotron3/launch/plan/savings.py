"""What packing and offloading take away from the forms of `activation_forms`. Derived from code, not
measured.

With a quantized format Transformer Engine keeps the input of a quantized linear packed, along the other axis,
in place of BF16. BF16 layers at both ends keep BF16; all layers of a kind count at their mean.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_nemotron3.launch.plan.activation_forms import Form, RankShare
from megatron_nemotron3.launch.plan.options import OFFLOADED
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.formats import BF16, FORMATS
from megatron_nemotron3.precision.table import LINEARS, bf16_layers

#: Bytes of an element with its share of the block's scale.
PACKED = {BF16: 2.0, **{fmt.name: fmt.stored for fmt in FORMATS.values()}}


@lru_cache(maxsize=1024)
def quantized_share(
    config: Nemotron3Config, layer: str, precision: str, kept: tuple[int, int] | None = None
) -> float:
    """The share of the decoder's layers of kind `layer` that do not stay BF16, from 0 to 1."""
    layers, published = config.pattern.count(layer), bf16_layers(config, precision)
    start, end = (published.start, published.end) if kept is None else kept
    body = config.pattern[start : config.num_layers - end]
    return body.count(layer) / layers if layers else 0.0


@lru_cache(maxsize=1024)
def bytes_by_linear(
    config: Nemotron3Config, precision: str, kept: tuple[int, int] | None = None
) -> dict[str, float]:
    """Linear of the precision table -> mean bytes of a packed element, over the decoder's layers."""
    if precision not in FORMATS:
        return {}
    found = {}
    for kind in LINEARS:
        format = kind.format(precision)
        if kind.layer and kind.layer in config.pattern and format != BF16:
            share = quantized_share(config, kind.layer, precision, kept)
            found[kind.name] = share * PACKED[format] + (1 - share) * PACKED[BF16]
    return found


def packing_saves(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Part of a layer's form -> bytes that packing saves (negative: adds)."""
    if not share.te or share.element != PACKED[BF16]:
        return {}
    sizes = bytes_by_linear(config, share.precision, share.options.bf16)
    found: Form = {}
    for part, linear, bf16, kept in _linear_inputs(config, share, kind):
        if linear in sizes:
            packed = bf16 * sizes[linear] / PACKED[BF16]
            # Where another module keeps the BF16 tensor anyway, the packed copy comes on top.
            found[part] = found.get(part, 0) + round((0 if kept else bf16) - packed)
    return found


def _linear_inputs(
    config: Nemotron3Config, share: RankShare, kind: str
) -> tuple[tuple[str, str, int, bool], ...]:
    """(part of the form, linear, bytes of its input in BF16, whether another module keeps that input)."""
    stream = share.stream(config.hidden_size)
    if kind == "M":
        inner = share.inner(config.mamba_inner_size // share.tp)
        return (("in_proj", "mamba_in", stream, False), ("out_proj", "mamba_out", inner, False))
    if kind == "*":
        heads = share.inner(config.num_attention_heads * config.kv_channels // share.tp)
        return (("linear_qkv", "attention", stream, False), ("linear_proj", "attention", heads, False))
    if kind == "-":
        hidden = share.inner((config.dense_ffn_hidden_size or 0) // share.tp)
        return (("linear_fc1", "mlp", stream, False), ("linear_fc2", "mlp", hidden, False))
    if kind == "E":
        rows = share.routed_rows(config) * share.element
        shared = share.inner((config.moe_shared_expert_intermediate_size or 0) // share.tp)
        return (
            ("experts", "experts", rows * config.expert_input_size, False),
            ("activation", "experts", rows * (config.moe_ffn_hidden_size or 0) // share.etp, False),
            ("shared_experts", "shared_experts", stream, True),  # the router keeps the norm's output
            ("shared_experts", "shared_experts", shared, False),
        )
    return ()


def offloaded(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Part of a layer's form -> bytes that fine-grained offloading moves to the CPU.

    Smaller tensors than `--min-offloaded-tensor-size` stay. One layer's come back in its backward.
    """
    modules = [name for name in share.options.offload if OFFLOADED.get(name) == kind]
    if not modules:
        return {}
    found: Form = {}
    saves = packing_saves(config, share, kind)
    for module, part, elements, bytes_per_element in _offloadable(config, share, kind):
        if module not in modules and not (kind == "E" and "fused_group_mlp" in modules):
            continue
        if elements >= share.options.least_offloaded:
            found[part] = found.get(part, 0) + round(elements * bytes_per_element)
    for part, number in found.items():
        if part in saves:
            found[part] = max(0, number - saves[part])
    return found


def _offloadable(
    config: Nemotron3Config, share: RankShare, kind: str
) -> tuple[tuple[str, str, int, float], ...]:
    """(module, part of the form, elements, bytes of one), with nothing packed."""
    width, size = share.shard * config.hidden_size, share.element
    if kind == "E":
        rows = share.routed_rows(config)
        hidden = rows * ((config.moe_ffn_hidden_size or 0) // share.etp)
        inputs = ("expert_fc1", "experts", rows * config.expert_input_size, size)
        return (inputs, ("moe_act", "experts", hidden, size), ("", "activation", hidden, size))
    if kind == "*":
        heads = share.tokens * config.num_attention_heads * config.kv_channels // share.tp
        mixed = heads + 2 * share.tokens * max(1, config.num_query_groups // share.tp) * config.kv_channels
        return (
            ("attn_norm", "norm", width, size),
            ("qkv_linear", "linear_qkv", width, size),
            ("core_attn", "core_attn", mixed, size),
            ("attn_proj", "linear_proj", heads, size),
        )
    return ()
