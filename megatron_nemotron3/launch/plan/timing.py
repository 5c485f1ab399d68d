"""Time of a training step: a model, with its assumptions in one place. docs/plan.md says what is added up.

No collective is hidden, as in the stock schedule of a hybrid model; kernel launches count as far as the GPU
waits for them. docs/measurements.md compares the model with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule
from megatron_nemotron3.launch.plan.activation_forms import RankShare
from megatron_nemotron3.launch.plan.activations import decoder_shares, layer_activations
from megatron_nemotron3.launch.plan.flops import (
    BACKWARD,
    layer_operations,
    letter,
    module_of,
    resolve,
    symbols,
)
from megatron_nemotron3.launch.plan.hardware import GPU
from megatron_nemotron3.launch.plan.options import GRAPHS, MODULES, CostOptions, Recompute
from megatron_nemotron3.launch.plan.state import grid_of, kind_elements, stage_elements
from megatron_nemotron3.launch.plan.traffic import (
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    deduplicated,
    layer_transfers,
    neighbors,
    outer_traffic,
    split,
    stage_kinds,
    strides,
    usable_domain,
)
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import elements_outside_layers
from megatron_nemotron3.models.tensors import ROWS
from megatron_nemotron3.precision.formats import FORMATS


@dataclass(frozen=True)
class Assumptions:
    """Numbers that no data sheet gives.

    products: share of the peak that a matrix product attains, by format. scan: the same of Mamba's scan, on
    the vector units. passes: how often a saved activation crosses memory in forward and backward. memory,
    nvlink, network: attained share of their bandwidth. In seconds for a microbatch and layer: launches: of
    the host, to start the layer's kernels. experts: an E layer's wait while the host learns how many tokens
    each expert gets. expert: the same for each expert of the rank, whose products the host starts. fsdp: to
    gather and free weights (Megatron-FSDP). latency: seconds of a collective.
    """

    products: dict[str, float] = field(hash=False)
    scan: float
    passes: float
    memory: float
    nvlink: float
    network: float
    launches: float
    experts: float
    expert: float
    fsdp: float
    latency: float


#: `scan` and `experts` are fitted to the published runs (`python benchmarks/plan_error.py --fit`). The others
#: are round numbers, chosen with the same runs in view: an activation is written, read by the next layer, and
#: read by backward; an eager layer starts about 300 kernels, and an expert 6 products, of 7 microseconds.
ASSUMED = Assumptions(
    products={"bf16": 0.75, "fp32": 0.75, **dict.fromkeys(FORMATS, 0.6), "nvfp4": 0.4},
    scan=0.3,
    passes=3.0,
    memory=0.7,
    nvlink=0.7,
    network=0.9,
    launches=2e-3,
    experts=4e-3,
    expert=6 * 7e-6,
    fsdp=2e-3,
    latency=15e-6,
)
#: Not a format: Mamba's scan runs on the vector units, not on those of matrix products.
SCAN = "scan"
#: Bytes of a weight read in forward and in backward, and of an FP32 gradient read and written.
_WEIGHT_PASSES = 2 + 2 + 8
#: Module that the precision recipe does not cover -> its format.
_FIXED_FORMAT = {"conv1d": "bf16", "scan": SCAN, "scores": "bf16", "router": "fp32"}


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one microbatch, forward and backward, by cause; layers: launches and waits."""

    products: float
    memory: float
    layers: float
    tp: float
    ep: float
    cp: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class StepTime(LayerTime):
    """Seconds of a step on the slowest pipeline rank: those of its layers, and those spent once a step."""

    pp: float
    bubble: float
    dp: float
    optimizer: float


@dataclass(frozen=True)
class Machine:
    """What a launch runs on, and what is assumed of it."""

    gpu: GPU
    assumed: Assumptions = ASSUMED

    @property
    def bandwidth(self) -> float:
        """Attained bytes a second of the GPU's memory."""
        return self.gpu.hbm * self.assumed.memory


def seconds(
    transfer: Collective, layout: ParallelLayout, machine: Machine, copies: int | None = None
) -> float:
    """Time of a transfer. NVLink and network work at the same time."""
    gpu, assumed = machine.gpu, machine.assumed
    sent = split(transfer, layout, gpu)
    if copies and transfer.collective == ALL_TO_ALL and transfer.link == "ep":
        local = neighbors(transfer.ranks, strides(layout)["ep"], usable_domain(gpu))
        sent = deduplicated(sent, copies, transfer.ranks, local)
    return transfer.calls * assumed.latency + max(
        sent.nvlink / (gpu.nvlink * assumed.nvlink), sent.network / (gpu.network * assumed.network)
    )


@lru_cache(maxsize=4096)
def module_formats(
    config: Nemotron3Config, precision: str, kept: tuple[int, int] | None = None
) -> dict[tuple[str, str], dict[str, float]]:
    """(layer kind, module) -> format -> share of the decoder's layers of that kind."""
    shares = decoder_shares(config, precision, kept)
    return {
        (row.part, module): shares[row.linear]
        for row in ROWS
        if row.linear in shares and (module := module_of(row)) is not None
    }


def _product_seconds(launch: Launch, config: Nemotron3Config, machine: Machine, kind: str) -> float:
    """Seconds of the matrix products of one token's forward pass through a layer, on one GPU."""
    if kind == "embedding":
        return 0.0
    precision = launch.precision
    plain = "fp32" if precision == "fp32" else "bf16"

    def rate(format: str) -> float:
        if format == SCAN:
            return machine.gpu.vector * machine.assumed.scan
        return machine.gpu.flops(format) * machine.assumed.products[format]

    outside = elements_outside_layers(config)
    if kind == "output":
        return 2.0 * outside["output_layer"] / rate(plain)
    if kind == "mtp":
        return 2.0 * (outside["mtp"] + outside["output_layer"]) / rate(plain)
    formats = module_formats(config, precision, CostOptions.of(launch).bf16)
    total = 0.0
    for module, flops in layer_operations(config, kind, launch.seq_length).items():
        shares = formats.get((kind, module)) or {_FIXED_FORMAT.get(module, plain): 1.0}
        total += sum(flops * share / rate(format) for format, share in shares.items())
    return total


def _layer_time(launch: Launch, machine: Machine, symbol: str, kept: RankShare) -> LayerTime:
    """`kept`: what a rank keeps where nothing is recomputed or packed, which is what crosses its memory."""
    layout, assumed, (config, kind) = launch.layout, machine.assumed, resolve(launch.config, symbol)
    tokens = launch.seq_length * launch.micro_batch_size
    forward = _product_seconds(launch, config, machine, kind) * tokens / (layout.tp * layout.cp)
    saved = layer_activations(launch, symbol, share=kept)
    held = kind_elements(config, kind, grid_of(layout))
    moved = sum(saved.values()) * assumed.passes / machine.bandwidth
    weights = (held.dense + held.expert) * _WEIGHT_PASSES / machine.bandwidth
    options = CostOptions.of(launch)
    recomputed = _recomputed_share(kind, options.recompute)
    copies = config.moe_router_topk if options.deduplicates else None
    comm = {"tp": 0.0, "ep": 0.0, "cp": 0.0}
    for transfer in layer_transfers(config, layout, kind, launch.seq_length, launch.micro_batch_size):
        link = "ep" if transfer.link == "etp" else transfer.link
        comm[link] += seconds(transfer, layout, machine, copies)
    # Forward is a third of products and memory traffic, and 2 of 5 or 2 of 4 collectives.
    products = forward * (1 + BACKWARD + recomputed)
    memory = moved * (1 + recomputed / 3) + weights * (1 + recomputed / 6)
    if kind not in "M*E-":
        return LayerTime(products, memory, 0.0, comm["tp"], comm["ep"], comm["cp"])
    tp, ep, cp = (
        comm["tp"] * (1 + recomputed * 0.4),
        comm["ep"] * (1 + recomputed * 0.5),
        comm["cp"] * (1 + recomputed * 0.5),
    )
    # The host runs ahead of the GPU, so launches cost only what they take longer than the GPU's work.
    launches = assumed.launches * (1 - captured(kind, options)) * (1 + recomputed / 3)
    waits = max(0.0, launches - products - memory - tp - ep - cp)
    if kind == "E":
        each = assumed.expert * (config.num_moe_experts or 0) / layout.ep
        waits += (assumed.experts + each) * (1 + recomputed / 3)
    waits += assumed.fsdp if options.fsdp else 0.0
    return LayerTime(products, memory, waits, tp, ep, cp)


#: Recomputed module -> its share of the layer's forward pass. An estimate, but for the whole layers.
_MODULE_SHARE = {
    "moe": 1.0,
    "mlp": 1.0,
    "shared_experts": 0.2,
    "core_attn": 0.3,
    "moe_act": 0.05,
    "layernorm": 0.03,
}


def captured(kind: str, options: CostOptions) -> float:
    """The share of a layer's kernel launches that CUDA graphs replace."""
    shares = (GRAPHS[name] for name in options.graphs if name in GRAPHS)
    return min(1.0, sum(share for layer, share in shares if layer == kind))


def _recomputed_share(kind: str, recompute: Recompute) -> float:
    """The share of a layer's forward pass that runs a second time."""
    if kind not in "M*E-":
        return 0.0
    if recompute.full:
        return 1.0
    return min(1.0, sum(_MODULE_SHARE[name] for name in recompute.modules if MODULES[name][0] == kind))


def one_replica(launch: Launch) -> Launch:
    """Return a launch without dp, pp and batch, which do not change a layer's time: a key of the cache."""
    schedule = TrainingSchedule(seq_length=launch.seq_length, micro_batch_size=launch.micro_batch_size)
    return replace(launch, layout=of_one_replica(launch.layout), schedule=schedule)


def of_one_replica(layout: ParallelLayout) -> ParallelLayout:
    """Return a layout without dp and pp."""
    return ParallelLayout(tp=layout.tp, sp=layout.sp, cp=layout.cp, ep=layout.ep, etp=layout.etp)


@lru_cache(maxsize=16384)
def layer_times(launch: Launch, machine: Machine) -> dict[str, LayerTime]:
    """Kind -> its time for a microbatch. `launch` is a result of `one_replica`."""
    dense = replace(launch, layout=replace(launch.layout, ep=1, etp=1))  # only E layers depend on ep and etp
    return _times(dense, machine, False) | _times(launch, machine, True)


@lru_cache(maxsize=16384)
def _times(launch: Launch, machine: Machine, experts: bool) -> dict[str, LayerTime]:
    """`layer_times` of E layers, or of all other kinds."""
    config, precision = launch.config, "fp32" if launch.precision == "fp32" else "bf16"
    # The backend is Transformer Engine on a GPU. Quantizing reads and writes what packing saves.
    kept = RankShare.of(replace(launch, backend="te", precision=precision, extra=()))
    kinds = dict.fromkeys((*symbols(config), *(config.mtp_pattern or ""), "embedding", "output", "mtp"))
    return {
        kind: _layer_time(launch, machine, kind, kept)
        for kind in kinds
        if (letter(kind) == "E") is experts and (kind != "mtp" or config.has_mtp)
    }


def step_time(launch: Launch, machine: Machine) -> StepTime:
    """Time of a step of `launch.microbatches` microbatches on every data-parallel rank."""
    config, layout = launch.config, launch.layout
    layers = layer_times(one_replica(launch), machine)
    totals, loads = {kind: layer.total for kind, layer in layers.items()}, []
    for rank in range(layout.pp):
        kinds = stage_kinds(config, layout.pp, layout.vpp, rank, launch.seq_length)
        loads.append((sum(totals[kind] * times for kind, times in kinds.items()), rank, kinds))
    slowest, rank, kinds = max(loads, key=lambda load: load[0])
    sums = {
        name: launch.microbatches * sum(getattr(layers[kind], name) * n for kind, n in kinds.items())
        for name in (part.name for part in fields(LayerTime))
    }
    pp = dp = 0.0
    options = CostOptions.of(launch)
    # Gradients travel with the last backward, weights with the first forward; with FSDP, with all of them.
    cover = slowest * (launch.microbatches if options.fsdp else 1)
    for transfer in outer_traffic(launch, rank, overlap=options.overlap):
        time = seconds(transfer, layout, machine)
        if transfer.link == "pp":
            pp += time
        elif transfer.overlaps:
            dp += max(0.0, time - cover * (2 / 3 if transfer.collective == REDUCE_SCATTER else 1 / 3))
        else:
            dp += time
    held = stage_elements(launch, rank)
    owned = held.dense / (layout.dp * layout.cp) + held.expert / layout.edp
    # Bytes that the optimizer reads and writes for an element: gradient, master, both moments, weight.
    touched = options.gradient + 2 * (options.master + options.moments) + options.weight
    return StepTime(
        **sums,
        pp=pp,
        bubble=slowest * (layout.pp - 1) / layout.vpp,
        dp=dp,
        optimizer=owned * touched / machine.bandwidth,
    )


def tokens_per_gpu(launch: Launch, step: StepTime) -> float:
    """Tokens per second and GPU."""
    sequences = launch.microbatches * launch.micro_batch_size * launch.layout.dp
    return launch.seq_length * sequences / step.total / launch.layout.world_size
