"""Time of a training step: a model, with its assumptions in one place. Standard library only.

A microbatch on a pipeline rank takes the sum, over its layers, of
products at a share of the GPU's peak in their format, saved activations read and written a number of times
(norms, convolutions, permutations, quantization are bound by memory), weights read and gradients added,
a fixed cost a layer (launches, host), and collectives, none of them hidden: what the stock schedule does with
a hybrid. A step is microbatches and pipeline bubble, data-parallel traffic that backward does not cover, and
the optimizer. How far it is from published runs: docs/measurements.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import elements_outside_layers
from megatron_nemotron3.models.tensors import ROWS
from megatron_nemotron3.plan.activations import layer_activations
from megatron_nemotron3.plan.elements import kind_elements, stage_elements
from megatron_nemotron3.plan.flops import BACKWARD, layer_operations, module_of
from megatron_nemotron3.plan.hardware import GPU
from megatron_nemotron3.plan.links import deduplicated, neighbors, split, strides, usable_domain
from megatron_nemotron3.plan.packed import quantized_share
from megatron_nemotron3.plan.recompute import MODULES as RECOMPUTED
from megatron_nemotron3.plan.recompute import NONE, Recompute
from megatron_nemotron3.plan.traffic import (
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Transfer,
    layer_transfers,
    outer_traffic,
    stage_kinds,
)
from megatron_nemotron3.precision.table import kind_named


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet says.

    products: share of the peak a product attains, by format. passes: times a saved activation crosses memory
    in forward and backward. memory, nvlink, network: attained share of their bandwidth. layer: seconds of a
    layer and microbatch that no size explains. latency: seconds of a collective.
    """

    products: dict[str, float] = field(hash=False)
    passes: float
    memory: float
    nvlink: float
    network: float
    layer: float
    latency: float


#: Products in MXFP8 and NVFP4, passes and layer are fitted to the 16 runs of `published`
#: (`python benchmarks/plan_error.py --fit`); the others are assumptions, BF16 among them: no such run is
#: published.
ASSUMED = Assumptions(
    products={"bf16": 0.65, "fp32": 0.65, "mxfp8": 0.55, "nvfp4": 0.42},
    passes=11.5,
    memory=0.7,
    nvlink=0.7,
    network=0.7,
    layer=1.7e-3,
    latency=15e-6,
)
#: Bytes of a weight read in forward and in backward, and of an FP32 gradient read and written.
_WEIGHT_PASSES = 2 + 2 + 8
#: Bytes the optimizer reads and writes for an element: gradient, master, both moments, weight.
_OPTIMIZER_BYTES = 4 + 8 + 16 + 2
#: What sends tokens to experts: every copy (`--moe-token-dispatcher-type alltoall`, what our flags emit), or
#: one a rank (flex with HybridEP, what published runs use).
ALLTOALL, HYBRIDEP = "alltoall", "hybridep"
_FORMATLESS = {"conv1d": "bf16", "scan": "bf16", "scores": "bf16", "router": "fp32"}


@dataclass(frozen=True)
class Layer:
    """Seconds of a layer and a microbatch, forward and backward, by cause."""

    products: float
    memory: float
    layers: float
    tp: float
    ep: float
    cp: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Step(Layer):
    """Seconds of a step on the slowest pipeline rank: its layers, and what comes once a step."""

    pp: float
    bubble: float
    dp: float
    optimizer: float


def seconds(
    transfer: Transfer,
    layout: ParallelLayout,
    gpu: GPU,
    assumed: Assumptions = ASSUMED,
    copies: int | None = None,
) -> float:
    """Time of a transfer. NVLink and network work at the same time.

    Args:
        copies: top-k, if the dispatcher sends a token to a rank once; None: all-to-all.
    """
    bytes_ = split(transfer, layout, gpu)
    if copies and transfer.collective == ALL_TO_ALL and transfer.link == "ep":
        local = neighbors(transfer.ranks, strides(layout)["ep"], usable_domain(gpu))
        bytes_ = deduplicated(bytes_, copies, transfer.ranks, local)
    return transfer.calls * assumed.latency + max(
        bytes_.nvlink / (gpu.nvlink * assumed.nvlink), bytes_.network / (gpu.network * assumed.network)
    )


@lru_cache(maxsize=4096)
def module_formats(config: Nemotron3Config, precision: str) -> dict[tuple[str, str], dict[str, float]]:
    """(layer kind, module) -> format -> share of the decoder's layers of that kind."""
    if precision in ("bf16", "fp32"):
        return {}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in ROWS:
        kind, module = kind_named(row.linear), module_of(row)
        if kind is None or module is None or not (kind.quantizable and kind.layer):
            continue
        share, format = quantized_share(config, kind.layer), kind.format(precision)
        found[kind.layer, module] = {"bf16": 1 - share, format: share} if format != "bf16" else {"bf16": 1.0}
    return found


def _product_seconds(
    config: Nemotron3Config,
    gpu: GPU,
    precision: str,
    kind: str,
    seq_length: int,
    assumed: Assumptions,
) -> float:
    """Of one token's forward pass through a layer on one GPU."""
    if kind == "embedding":
        return 0.0
    plain = "fp32" if precision == "fp32" else "bf16"

    def at(format: str) -> float:
        return gpu.flops(format) * assumed.products[format]

    outside = elements_outside_layers(config)
    if kind == "output":
        return 2.0 * outside["output_layer"] / at(plain)
    if kind == "mtp":
        return 2.0 * (outside["mtp"] + outside["output_layer"]) / at(plain)
    formats = module_formats(config, precision)
    total = 0.0
    for module, flops in layer_operations(config, kind, seq_length).items():
        shares = formats.get((kind, module)) or {_FORMATLESS.get(module, plain): 1.0}
        total += sum(flops * share / at(format) for format, share in shares.items())
    return total


@lru_cache(maxsize=65536)
def _layer(
    config: Nemotron3Config,
    gpu: GPU,
    layout: ParallelLayout,
    kind: str,
    seq_length: int,
    micro_batch_size: int,
    precision: str,
    recompute: Recompute,
    dispatcher: str,
    assumed: Assumptions,
) -> Layer:
    tokens = seq_length * micro_batch_size
    forward = _product_seconds(config, gpu, precision, kind, seq_length, assumed)
    forward *= tokens / (layout.tp * layout.cp)
    # The backend is TransformerEngine on a GPU; what it keeps is what crosses memory.
    saved = layer_activations(
        config,
        layout,
        kind,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        # Packing spares what quantizing reads and writes.
        precision="fp32" if precision == "fp32" else "bf16",
        backend="te",
    )
    held = kind_elements(config, kind, layout.tp, layout.etp, layout.ep)
    bandwidth = gpu.hbm * assumed.memory
    moved = sum(saved.values()) * assumed.passes / bandwidth
    weights = (held.dense + held.expert) * _WEIGHT_PASSES / bandwidth
    again = _again(kind, recompute)
    copies = config.moe_router_topk if dispatcher == HYBRIDEP else None
    comm = {"tp": 0.0, "ep": 0.0, "cp": 0.0}
    for transfer in layer_transfers(config, layout, kind, seq_length, micro_batch_size):
        link = "ep" if transfer.link == "etp" else transfer.link
        comm[link] += seconds(transfer, layout, gpu, assumed, copies)
    # Forward is a third of products and memory traffic, 2 of 5 or 2 of 4 collectives.
    return Layer(
        forward * (1 + BACKWARD + again),
        moved * (1 + again / 3) + weights * (1 + again / 6),
        assumed.layer * (1 + again / 3) if kind in "M*E-" else 0.0,
        comm["tp"] * (1 + again * 0.4),
        comm["ep"] * (1 + again * 0.5),
        comm["cp"] * (1 + again * 0.5),
    )


#: Share of a layer's forward pass that a recomputed module is: an estimate; "moe" and "mlp" are all of it.
_MODULE_SHARE = {
    "moe": 1.0,
    "mlp": 1.0,
    "shared_experts": 0.2,
    "core_attn": 0.3,
    "moe_act": 0.05,
    "layernorm": 0.03,
}


def _again(kind: str, recompute: Recompute) -> float:
    """How much of a layer's forward pass runs a second time."""
    if kind not in "M*E-":
        return 0.0
    if recompute.full:
        return 1.0
    return min(1.0, sum(_MODULE_SHARE[name] for name in recompute.modules if RECOMPUTED[name][0] == kind))


@lru_cache(maxsize=16384)
def layer_times(
    config: Nemotron3Config,
    gpu: GPU,
    layout: ParallelLayout,
    seq_length: int,
    micro_batch_size: int,
    precision: str,
    recompute: Recompute,
    dispatcher: str,
    assumed: Assumptions,
) -> dict[str, Layer]:
    """Kind -> its time for a microbatch. `layout` is a `cell`: dp and pp are not looked at."""
    kinds = dict.fromkeys((*config.pattern, *(config.mtp_pattern or ""), "embedding", "output", "mtp"))
    dense = replace(layout, ep=1, etp=1)  # only experts know of the others
    return {
        kind: _layer(
            config,
            gpu,
            layout if kind == "E" else dense,
            kind,
            seq_length,
            micro_batch_size,
            precision,
            recompute,
            dispatcher,
            assumed,
        )
        for kind in kinds
        if kind != "mtp" or config.has_mtp
    }


def cell(layout: ParallelLayout) -> ParallelLayout:
    """What a layer's time depends on: without dp and pp, so that one entry serves all of them."""
    return ParallelLayout(tp=layout.tp, sp=layout.sp, cp=layout.cp, ep=layout.ep, etp=layout.etp)


def step_time(
    config: Nemotron3Config,
    layout: ParallelLayout,
    gpu: GPU,
    *,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    microbatches: int = 1,
    precision: str = "bf16",
    recompute: Recompute = NONE,
    dispatcher: str = ALLTOALL,
    assumed: Assumptions = ASSUMED,
    layers: dict[str, Layer] | None = None,
) -> Step:
    """A step of `microbatches` microbatches on every data-parallel rank.

    Args:
        dispatcher: `ALLTOALL` or `HYBRIDEP`.
        layers: `layer_times` of the same arguments, if at hand.

    Raises:
        ValueError: the GPU has no units for the precision.
    """
    length = seq_length or config.seq_length
    if layers is None:
        layers = layer_times(
            config, gpu, cell(layout), length, micro_batch_size, precision, recompute, dispatcher, assumed
        )
    loads = [
        (sum(layers[kind].total * times for kind, times in kinds.items()), rank, kinds)
        for rank, kinds in enumerate(stages(config, layout.pp, layout.vpp, length))
    ]
    slowest, rank, kinds = max(loads, key=lambda load: load[0])
    sums = {
        name: microbatches * sum(getattr(layers[kind], name) * times for kind, times in kinds.items())
        for name in (part.name for part in fields(Layer))
    }
    pp = dp = 0.0
    for transfer in outer_traffic(
        config,
        layout,
        pp_rank=rank,
        seq_length=length,
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
    ):
        time = seconds(transfer, layout, gpu, assumed)
        if transfer.link == "pp":
            pp += time
        elif transfer.overlaps:  # gradients behind the last backward, weights behind the first forward
            dp += max(0.0, time - slowest * (2 / 3 if transfer.collective == REDUCE_SCATTER else 1 / 3))
        else:
            dp += time
    held = stage_elements(config, layout, rank, length)
    owned = held.dense / (layout.dp * layout.cp) + held.expert / layout.edp
    return Step(
        **sums,
        pp=pp,
        bubble=slowest * (layout.pp - 1) / layout.vpp,
        dp=dp,
        optimizer=owned * _OPTIMIZER_BYTES / (gpu.hbm * assumed.memory),
    )


@lru_cache(maxsize=65536)
def stages(config: Nemotron3Config, pp: int, vpp: int, seq_length: int) -> tuple[dict[str, int], ...]:
    """`stage_kinds` of every pipeline rank."""
    layout = ParallelLayout(pp=pp, vpp=vpp)
    return tuple(stage_kinds(config, layout, rank, seq_length) for rank in range(pp))


def tokens_per_gpu(step: Step, layout: ParallelLayout, seq_length: int, global_batch_size: int) -> float:
    """Tokens a second and GPU."""
    return seq_length * global_batch_size / step.total / layout.world_size
