"""Bytes of activations that one microbatch leaves on a rank until its backward.

Routing is taken to be balanced, but for `imbalance`: the rows on the busiest rank over those that its tokens
send. What packing and offloading take away is derived from code, not measured: Transformer Engine keeps the
input of a quantized linear packed, along the other axis. BF16 layers at both ends keep BF16; all layers of a
kind count at their mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from typing import NamedTuple

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.plan.activation_forms import DROPPED, FORMS, Form, RankShare
from megatron_nemotron3.launch.plan.flops import letter, resolve, symbols
from megatron_nemotron3.launch.plan.options import MODULES, OFFLOADED, Recompute, runs
from megatron_nemotron3.launch.plan.state import has_adapter, named_layers
from megatron_nemotron3.models import LoRASettings, Nemotron3Config
from megatron_nemotron3.models.tensors import Row, rows_of
from megatron_nemotron3.precision.formats import BF16, FORMATS
from megatron_nemotron3.precision.model_formats import ModelFormats

#: Kind -> bytes of one microbatch, see `_kind_bytes`.
Table = dict[str, tuple[int, int, int]]
#: The kinds of `layer_activations`: those of the pattern, and the parts of a model that are no layers.
KINDS = tuple(FORMS)
#: Bytes of an element with its share of the block's scale.
PACKED = {BF16: 2.0, **{fmt.name: fmt.stored for fmt in FORMATS.values()}}


def decoder_shares(
    config: Nemotron3Config, precision: str, kept: tuple[int, int] | None = None
) -> dict[str, dict[str, float]]:
    """Linear of the precision table -> format -> share of the decoder's, with the published recipe."""
    return _shares(ModelFormats.of(config, precision, kept)) if precision in FORMATS else {}


@lru_cache(maxsize=64)  # layers of different experts have the same
def _shares(formats: ModelFormats) -> dict[str, dict[str, float]]:
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for linear, _, has in formats.linears():
        if linear.layer is not None:
            found[linear.kind.name][has] += 1
    shares = {}
    for kind, counts in found.items():
        quantized = {format: n / counts.total() for format, n in counts.items() if format != BF16}
        shares[kind] = {**quantized, BF16: 1 - sum(quantized.values())}
    return shares


@lru_cache(maxsize=1024)
def bytes_by_linear(
    config: Nemotron3Config, precision: str, kept: tuple[int, int] | None = None
) -> dict[str, float]:
    """Quantized linear of the precision table -> mean bytes of an element of its input, over all layers."""
    return {
        linear: sum(share * PACKED[format] for format, share in shares.items())
        for linear, shares in decoder_shares(config, precision, kept).items()
        if shares[BF16] < 1
    }


def packing_saves(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Part of a layer's form -> bytes that packing saves (negative: adds)."""
    if not share.te or share.element != PACKED[BF16]:
        return {}
    sizes = bytes_by_linear(config, share.precision, share.options.bf16)
    found: Form = {}
    for one in _linear_inputs(config, share, kind):
        if one.linear in sizes:
            packed = one.size * sizes[one.linear] / PACKED[BF16]
            # Where another module keeps the BF16 tensor anyway, the packed copy comes on top.
            found[one.part] = found.get(one.part, 0) + round((0 if one.kept else one.size) - packed)
    return found


class _LinearInput(NamedTuple):
    """What a linear multiplies: the part of the form that counts it, and its bytes if it is not packed.

    linear: of the precision table, "" if it is not packed. kept: whether another module keeps it, too.
    """

    module: str
    part: str
    linear: str
    size: int
    kept: bool = False


def _linear_inputs(config: Nemotron3Config, share: RankShare, kind: str) -> tuple[_LinearInput, ...]:
    stream = share.stream(config.hidden_size)
    if kind == "M":
        inner = share.inner(config.mamba_inner_size // share.tp)
        return (
            _LinearInput("mixer.in_proj", "in_proj", "mamba_in", stream),
            _LinearInput("mixer.out_proj", "out_proj", "mamba_out", inner),
        )
    if kind == "*":
        heads = share.inner(config.num_attention_heads * config.kv_channels // share.tp)
        return (
            _LinearInput("self_attention.linear_qkv", "linear_qkv", "attention", stream),
            _LinearInput("self_attention.linear_proj", "linear_proj", "attention", heads),
        )
    if kind == "-":
        hidden = share.inner((config.dense_ffn_hidden_size or 0) // share.tp)
        return (
            _LinearInput("mlp.linear_fc1", "linear_fc1", "mlp", stream),
            _LinearInput("mlp.linear_fc2", "linear_fc2", "mlp", hidden),
        )
    if kind == "E":
        rows = share.routed_rows(config) * share.element
        hidden = rows * (config.moe_ffn_hidden_size or 0) // share.etp
        shared = share.inner((config.moe_shared_expert_intermediate_size or 0) // share.tp)
        latent = share.stream(config.expert_input_size) if config.moe_latent_size else 0
        return (  # the router keeps the norm's output
            _LinearInput("mlp.experts.linear_fc1", "experts", "experts", rows * config.expert_input_size),
            _LinearInput("mlp.experts.linear_fc2", "activation", "experts", hidden),
            _LinearInput("mlp.shared_experts.linear_fc1", "shared_experts", "shared_experts", stream, True),
            _LinearInput("mlp.shared_experts.linear_fc2", "shared_experts", "shared_experts", shared),
            _LinearInput("mlp.fc1_latent_proj", "fc2_latent_proj", "", stream, True),
            _LinearInput("mlp.fc2_latent_proj", "fc2_latent_proj", "", latent),
        )
    return (_LinearInput("eh_proj", "eh_proj", "", 2 * stream),) if kind == "mtp" else ()


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


@lru_cache(maxsize=256)
def adapted_linears(config: Nemotron3Config, lora: LoRASettings, kind: str) -> frozenset[str]:
    """Modules, such as "mixer.in_proj", that have an adapter in any layer of a kind."""
    part = "mtp_in" if kind == "mtp" else kind
    names = [name for name, symbol in named_layers(config, (config.pattern,), 0) if symbol == part]
    rows = [row for row in rows_of(config, part) if any(has_adapter(lora, name, row) for name in names)]
    return frozenset(row.modules[0] for row in rows)


def _frozen_changes(config: Nemotron3Config, share: RankShare, kind: str, lora: LoRASettings) -> Form:
    """Part of a kind's form -> bytes that frozen weights and adapters add (negative: save)."""
    form, found = FORMS[kind](config, share), Counter[str]()
    for part in _READ_BY_WEIGHTS.get(kind, ()):
        found[part] -= form[part]
    adapted = adapted_linears(config, lora, kind)
    rows = {row.modules[0]: row for row in rows_of(config, "mtp_in" if kind == "mtp" else kind) if row.linear}
    for one in _linear_inputs(config, share, kind):
        row = rows.get(one.module)
        if row is not None and one.module in adapted:
            found[one.part] += _adapter_keeps(config, share, row, lora.dim)
        # The experts' functions keep their inputs in any case, and attention its output.
        elif not (one.kept or "mlp.experts" in one.module or _is_attention_output(share, one.module)):
            found[one.part] -= one.size
        if one.part == "activation" and not share.te and any("mlp.experts" in module for module in adapted):
            found[one.part] += one.size  # FC1, activation and FC2 are computed one by one
    return found


def _adapter_keeps(config: Nemotron3Config, share: RankShare, row: Row, dim: int) -> int:
    """Bytes of what B multiplies, [tokens, dim]; A multiplies the input of the linear."""
    if row.routed:
        return share.routed_rows(config) * (dim // share.etp if row.tp == "row" else dim) * share.element
    return share.inner(dim) if row.tp in ("column", "parts") else share.stream(dim)


def _is_attention_output(share: RankShare, module: str) -> bool:
    return module.endswith("linear_proj") and "core_attn" not in share.options.recompute.modules


#: Kind -> parts that only the gradient of a table reads.
_READ_BY_WEIGHTS = {"embedding": ("word_embeddings",), "mtp": ("embedding",), "output": ("output_layer",)}


@lru_cache(maxsize=65536)
def _whole_form(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Bytes of a kind by module when nothing is recomputed."""
    config, kind = resolve(config, kind)
    form = FORMS[kind](config, share)
    for part, saved in packing_saves(config, share, kind).items():
        form[part] -= saved
    if (lora := share.options.lora) is not None:
        for part, changed in _frozen_changes(config, share, kind, lora).items():
            form[part] += changed
    return form


@lru_cache(maxsize=65536)
def _kept_form(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Bytes of a kind by module, without what selective recomputation drops."""
    config, kind = resolve(config, kind)
    form = _whole_form(config, share, kind)
    # A name of MODULES belongs to one kind of layer; parts of other kinds may have the same names.
    names = [name for name in share.options.recompute.modules if kind == MODULES[name][0]]
    dropped = {part for name in names for part in DROPPED[name]}
    moved = offloaded(config, share, kind)
    return {
        part: number - moved.get(part, 0)
        for part, number in form.items()
        if part not in dropped and number > moved.get(part, 0)
    }


@lru_cache(maxsize=65536)
def _kind_bytes(config: Nemotron3Config, share: RankShare) -> Table:
    """Kind -> bytes (kept, recomputed, of its input), without the recomputation of whole layers."""
    kinds = dict.fromkeys(symbols(config) + (config.mtp_pattern or ""))
    found = {}
    for kind in (*kinds, "mtp", "embedding", "output"):
        whole, kept = (sum(form(config, share, kind).values()) for form in (_whole_form, _kept_form))
        found[kind] = (kept, whole - kept, share.stream(config.hidden_size))
    return found


def layer_activations(
    launch: Launch, kind: str, *, imbalance: float = 1.0, share: RankShare | None = None
) -> dict[str, int]:
    """Bytes that one layer keeps for one microbatch on one rank, by module.

    Backend "torch" is measured on a CPU; "auto", with its GPU kernels, and "te" are derived, not measured.
    When whole layers are recomputed, the layer is taken to be the first of a run: it keeps its input.
    share: `RankShare.of(launch, imbalance)`, if it is known.
    """
    if letter(kind) not in KINDS:
        raise ValueError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    share = share or RankShare.of(launch, imbalance)
    if share.options.recompute.full and letter(kind) in "M*E-":
        return {"input": share.stream(launch.config.hidden_size)}
    return dict(_kept_form(launch.config, share, kind))


class _Unit(NamedTuple):
    """A layer, a run of recomputed layers, an MTP depth or the model's end, in backward."""

    kind: str
    kept: int
    again: int
    experts: bool


def _layer_units(pattern: str, recompute: Recompute, table: Table) -> list[_Unit]:
    saved, whole = runs(pattern, recompute)
    of_run, of_layer = {}, {}
    for run in dict.fromkeys(saved):
        kept = table[run[0]][2]
        experts = any(letter(kind) == "E" for kind in run)
        again = sum(table[kind][0] for kind in run) - kept
        of_run[run] = _Unit(letter(run[0]), kept, again, experts)
    for kind in dict.fromkeys(whole):
        of_layer[kind] = _Unit(letter(kind), *table[kind][:2], letter(kind) == "E")
    return [of_run[run] for run in saved] + [of_layer[kind] for kind in whole]


def _mtp_units(config: Nemotron3Config, recompute: Recompute, table: Table) -> list[_Unit]:
    """One depth in the order of forward. Method "uniform" recomputes the whole depth, others its layers."""
    inner, (own, _, stream) = config.mtp_pattern or "", table["mtp"]
    if not (recompute.full and recompute.method == "uniform"):
        return [_Unit("mtp", own, 0, False), *_layer_units(inner, recompute, table)]
    kept = 2 * stream + table["embedding"][0]
    layers = [table[kind][2] for kind in inner]  # inside the depth, each layer is checkpointed once more
    again = own - kept + sum(layers) + max(table[kind][0] - table[kind][2] for kind in inner)
    return [_Unit("mtp", kept, again, "E" in inner)]


@lru_cache(maxsize=65536)
def stage_bytes(
    config: Nemotron3Config, share: RankShare, patterns: tuple[str, ...], stage: int, expert_work: int = 0
) -> tuple[dict[str, int], int, int]:
    """Bytes of one microbatch on a stage: (kept by layer kind, peak of recomputation, peak of `expert_work`).

    MTP's layers are counted under their own kinds; "mtp" is what the depths keep in addition.
    """
    recompute, table = share.options.recompute, _kind_bytes(config, share)
    units = [_Unit("embedding", table["embedding"][0], 0, False)] if stage == 0 else []
    units += _layer_units(patterns[stage], recompute, table)
    if stage == len(patterns) - 1:
        for _ in range(config.mtp_num_layers):
            units += _mtp_units(config, recompute, table)
        units.append(_Unit("output", table["output"][0], 0, False))
    found: dict[str, int] = {}
    for unit in units:
        found[unit.kind] = found.get(unit.kind, 0) + unit.kept
    freed = exceeds = with_work = 0
    for unit in reversed(units):
        if unit.again or unit.experts:
            exceeds = max(exceeds, unit.again - freed)
            with_work = max(with_work, unit.again + unit.experts * expert_work - freed)
        freed += unit.kept
    return found, exceeds, with_work - exceeds
