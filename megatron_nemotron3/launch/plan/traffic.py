"""Bytes that cross links in a training step, by process group and cause, in closed form.

The collectives are those of Megatron with the flags of this package; exchanges of sizes are left out. The
ranks of a group have a fixed stride (tp, cp, dp, pp; expert grid: etp, ep, edp, pp). Ranks in one NVLink
domain communicate over NVLink, others over the network; collectives over several domains count as NCCL's two
levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.plan.flops import resolve
from megatron_nemotron3.launch.plan.hardware import GPU
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.launch.plan.state import padded_vocab_size, stage_elements, stage_patterns
from megatron_nemotron3.models import Nemotron3Config

#: Bytes of an activation or weight that crosses a link (BF16; nothing is sent in FP8), and of FP32.
ACTIVATION, SINGLE = 2, 4
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, SEND = "all-to-all", "send"


@dataclass(frozen=True)
class Collective:
    """One kind of collective of one rank in a step.

    link: the group it runs in: "tp", "cp", "ep", "etp", "pp", "dp" (data and context ranks), "edp" (copies of
    the experts) or "embedding" (first and last stage). ranks: size of the group. buffer: bytes of the whole
    buffers, those of all ranks together, over the step. overlaps: whether Megatron hides it behind
    computation.
    """

    link: str
    module: str
    collective: str
    ranks: int
    calls: float
    buffer: float
    overlaps: bool = False

    @property
    def sent(self) -> float:
        if self.collective == SEND:
            return self.buffer
        share = (self.ranks - 1) / self.ranks
        return self.buffer * share * (2 if self.collective == ALL_REDUCE else 1)


@lru_cache(maxsize=4096)
def layer_transfers(
    config: Nemotron3Config, layout: ParallelLayout, kind: str, seq_length: int, micro_batch_size: int
) -> tuple[Collective, ...]:
    """Transfers of one layer for one microbatch, forward and backward."""
    config, kind = resolve(config, kind)
    tokens = seq_length // layout.cp * micro_batch_size
    return tuple(t for t in _LAYER_TRANSFERS[kind](config, layout, tokens) if t.ranks > 1 and t.buffer)


def _tensor_parallel(
    layout: ParallelLayout, module: str, whole: int, sharded: Sequence[tuple[str, int]], reductions: int
) -> Iterator[Collective]:
    """Yield `sharded`, (collective, how often) with sequence parallelism, or this many all-reductions."""
    for collective, times in sharded if layout.sequence_parallel else [(ALL_REDUCE, reductions)]:
        yield Collective("tp", module, collective, layout.tp, times, times * whole)


def _linear_pair(
    config: Nemotron3Config, layout: ParallelLayout, tokens: int, module: str
) -> Iterator[Collective]:
    """A column-parallel and a row-parallel linear around something sharded."""
    whole = tokens * config.hidden_size * ACTIVATION
    return _tensor_parallel(layout, module, whole, [(ALL_GATHER, 3), (REDUCE_SCATTER, 2)], 2)


def _mamba_transfers(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Collective]:
    yield from _linear_pair(config, layout, tokens, "mamba")
    # z, x, B, C and dt are exchanged for heads, then y and z (for the gated norm) back. Groups are repeated
    # first where there are fewer than ranks.
    groups = max(config.mamba_num_groups // layout.tp, layout.cp)
    inner, heads = config.mamba_inner_size // layout.tp, config.mamba_num_heads // layout.tp
    width = 4 * inner + 2 * groups * config.mamba_state_dim + heads
    yield Collective("cp", "mamba", ALL_TO_ALL, layout.cp, 14, 2 * tokens * width * ACTIVATION)


def _attention_transfers(
    config: Nemotron3Config, layout: ParallelLayout, tokens: int
) -> Iterator[Collective]:
    yield from _linear_pair(config, layout, tokens, "attention")
    groups = max(1, config.num_query_groups // layout.tp)
    keys = 2 * groups * config.kv_channels * ACTIVATION * tokens * layout.cp
    yield Collective("cp", "attention", ALL_GATHER, layout.cp, 2, keys)
    yield Collective("cp", "attention", REDUCE_SCATTER, layout.cp, 2, keys)
    if layout.tp > config.num_query_groups:  # every rank gathers the projection and takes its heads
        rows = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        yield Collective("tp", "attention", ALL_GATHER, layout.tp, 1, tokens * rows * ACTIVATION)
        yield Collective("tp", "attention", REDUCE_SCATTER, layout.tp, 1, tokens * rows * ACTIVATION)


def _experts_transfers(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Collective]:
    if config.moe_shared_expert_intermediate_size:
        yield from _linear_pair(config, layout, tokens, "shared experts")
    # Each tensor rank routes its own part of the sequence.
    copies = tokens // layout.tp * (config.moe_router_topk or 0)
    width = config.moe_latent_size or config.hidden_size
    row = width * ACTIVATION
    yield Collective("ep", "experts", ALL_TO_ALL, layout.ep, 4, 4 * copies * row)
    yield Collective("ep", "probabilities", ALL_TO_ALL, layout.ep, 2, 2 * copies * SINGLE)
    gathered = copies * layout.etp
    # The sums over the parts of an expert are FP32, and so is their gradient.
    forth, back = gathered * row, gathered * width * SINGLE
    yield Collective("etp", "experts", ALL_GATHER, layout.etp, 2, forth + back)
    yield Collective("etp", "experts", REDUCE_SCATTER, layout.etp, 2, forth + back)
    yield Collective("etp", "probabilities", ALL_GATHER, layout.etp, 1, gathered * SINGLE)
    yield Collective("etp", "probabilities", REDUCE_SCATTER, layout.etp, 1, gathered * SINGLE)


def _embedding_transfers(
    config: Nemotron3Config, layout: ParallelLayout, tokens: int
) -> Iterator[Collective]:
    whole = tokens * config.hidden_size * ACTIVATION
    return _tensor_parallel(layout, "embedding", whole, [(REDUCE_SCATTER, 1), (ALL_GATHER, 1)], 1)


def _output_transfers(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Collective]:
    whole = tokens * config.hidden_size * ACTIVATION
    yield from _tensor_parallel(layout, "output", whole, [(ALL_GATHER, 2), (REDUCE_SCATTER, 1)], 1)
    # Maximum, sum and target logit of every token.
    yield Collective("tp", "loss", ALL_REDUCE, layout.tp, 3, 3 * tokens * SINGLE)


def _mtp_transfers(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Collective]:
    yield from _embedding_transfers(config, layout, tokens)
    yield from _output_transfers(config, layout, tokens)
    whole = tokens * config.hidden_size * ACTIVATION
    if layout.sequence_parallel:
        # The input of eh_proj is 2 d wide; its output is gathered, then sliced along the sequence.
        yield Collective("tp", "eh_proj", ALL_GATHER, layout.tp, 4, 6 * whole)
        yield Collective("tp", "eh_proj", REDUCE_SCATTER, layout.tp, 1, 2 * whole)
    else:
        yield Collective("tp", "eh_proj", ALL_GATHER, layout.tp, 1, whole)
        yield Collective("tp", "eh_proj", ALL_REDUCE, layout.tp, 1, 2 * whole)


_LAYER_TRANSFERS: dict[str, Callable[[Nemotron3Config, ParallelLayout, int], Iterator[Collective]]] = {
    "M": _mamba_transfers,
    "*": _attention_transfers,
    "E": _experts_transfers,
    "-": partial(_linear_pair, module="mlp"),
    "embedding": _embedding_transfers,
    "output": _output_transfers,
    "mtp": _mtp_transfers,
}


@lru_cache(maxsize=65536)
def stage_kinds(config: Nemotron3Config, pp: int, vpp: int, pp_rank: int, seq_length: int) -> dict[str, int]:
    """Layer kind (as in `layer_transfers`) -> how often a pipeline rank applies it to a microbatch."""
    stages = stage_patterns(config, pp * vpp, seq_length)
    applied = "".join(stages[pp_rank::pp])
    last = pp_rank == pp - 1
    depths = config.mtp_num_layers if config.has_mtp and last else 0
    applied += (config.mtp_pattern or "") * depths
    found = {kind: applied.count(kind) for kind in dict.fromkeys(applied)}
    found |= {"embedding": int(pp_rank == 0), "output": int(last), "mtp": depths}
    return {kind: times for kind, times in found.items() if times}


def step_traffic(launch: Launch, pp_rank: int = 0, *, overlap: bool = True) -> list[Collective]:
    """The transfers that one rank of a pipeline stage takes part in, in one step.

    Without the distributed optimizer, gradients are all-reduced and no weights are gathered.
    """
    config, layout = launch.config, launch.layout
    found: dict[tuple[str, str, str], Collective] = {}
    for kind, times in stage_kinds(config, layout.pp, layout.vpp, pp_rank, launch.seq_length).items():
        times *= launch.microbatches
        for transfer in layer_transfers(config, layout, kind, launch.seq_length, launch.micro_batch_size):
            key = (transfer.link, transfer.module, transfer.collective)
            before = found.get(key)
            calls, buffer = (before.calls, before.buffer) if before else (0.0, 0.0)
            found[key] = replace(
                transfer, calls=calls + times * transfer.calls, buffer=buffer + times * transfer.buffer
            )
    return [*found.values(), *outer_traffic(launch, pp_rank, overlap=overlap)]


def outer_traffic(launch: Launch, pp_rank: int = 0, *, overlap: bool = True) -> list[Collective]:
    """The part of `step_traffic` that no layer causes: between stages, and of gradients and weights."""
    found = (*_pipeline_transfers(launch, pp_rank), *_state_transfers(launch, pp_rank, overlap))
    return [transfer for transfer in found if transfer.ranks > 1 and transfer.buffer]


def _pipeline_transfers(launch: Launch, pp_rank: int) -> Iterator[Collective]:
    """Hidden states to the next stage, and their gradients to the previous one."""
    layout = launch.layout
    tokens = launch.seq_length // layout.cp * launch.micro_batch_size
    hidden = tokens * launch.config.hidden_size * ACTIVATION
    if layout.sequence_parallel:
        hidden //= layout.tp
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    forward, backward = layout.vpp - last, layout.vpp - first  # the last chunk of the last rank sends nothing
    for module, times in (("activations", forward), ("gradients", backward)):
        sends = times * launch.microbatches
        yield Collective("pp", module, SEND, layout.pp, sends, sends * hidden)


def _state_transfers(launch: Launch, pp_rank: int, overlap: bool) -> Iterator[Collective]:
    """Gradients and weights, once a step; with Megatron-FSDP once a microbatch."""
    config, layout, options = launch.config, launch.layout, CostOptions.of(launch)
    held, gradient = stage_elements(launch, pp_rank), options.gradient
    gathers = 2 if held.expert and not overlap else 1
    groups = (("dp", layout.dp * layout.cp, held.dense), ("edp", layout.edp, held.expert))
    for link, ranks, elements in groups:
        if options.fsdp:
            # Each microbatch gathers the weights for forward and for backward, and scatters its gradients.
            times, inside = launch.microbatches, max(1, ranks // options.instances)
            moved = 2 * times * elements * ACTIVATION
            yield Collective(link, "weights", ALL_GATHER, inside, 2 * times, moved, True)
            moved = times * elements * gradient
            yield Collective(link, "gradients", REDUCE_SCATTER, inside, times, moved, True)
        elif launch.distributed_optimizer:
            yield Collective(link, "gradients", REDUCE_SCATTER, ranks, 1, elements * gradient, overlap)
            gathered = gathers * elements * ACTIVATION
            yield Collective(link, "weights", ALL_GATHER, ranks, gathers, gathered, overlap)
        else:
            yield Collective(link, "gradients", ALL_REDUCE, ranks, 1, elements * gradient, overlap)
    if layout.pp > 1 and config.has_mtp and pp_rank in (0, layout.pp - 1):
        table = padded_vocab_size(config, layout) // layout.tp * config.hidden_size
        yield Collective("embedding", "gradients", ALL_REDUCE, 2, 1, table * gradient)
    if layout.sequence_parallel:
        yield Collective(
            "tp", "replicated weights' gradients", ALL_REDUCE, layout.tp, 1, held.replicated * gradient
        )


def strides(layout: ParallelLayout) -> dict[str, int]:
    """Link -> distance between neighboring ranks of its group."""
    stage = layout.tp * layout.cp * layout.dp
    return {
        "tp": 1,
        "cp": layout.tp,
        "dp": layout.tp,  # context ranks belong to the group
        "pp": stage,
        "embedding": stage * (layout.pp - 1),
        "etp": 1,
        "ep": layout.etp,
        "edp": layout.expert_ranks,
    }


def usable_domain(gpu: GPU) -> int:
    """GPUs of an NVLink domain that groups of powers of two can use: 64 of 72, as NVIDIA's launches do."""
    return int(2 ** (gpu.nvlink_domain.bit_length() - 1))


@dataclass(frozen=True)
class Split:
    """Bytes that one rank sends over each kind of link."""

    nvlink: float
    network: float


def neighbors(ranks: int, stride: int, domain: int) -> int:
    """Number of ranks of a group that share an NVLink domain."""
    return max(1, min(ranks, domain // stride))


def split(transfer: Collective, layout: ParallelLayout, gpu: GPU) -> Split:
    """Divide the bytes that a rank sends between NVLink and the network."""
    local = neighbors(transfer.ranks, strides(layout)[transfer.link], usable_domain(gpu))
    if transfer.collective == SEND:
        return Split(transfer.buffer, 0.0) if local > 1 else Split(0.0, transfer.buffer)
    if transfer.collective == ALL_TO_ALL:
        each = transfer.buffer / transfer.ranks
        return Split(each * (local - 1), each * (transfer.ranks - local))
    times = 2 if transfer.collective == ALL_REDUCE else 1
    domains = transfer.ranks / local
    return Split(
        times * transfer.buffer * (local - 1) / local,
        times * transfer.buffer / local * (domains - 1) / domains,
    )


def deduplicated(whole: Split, topk: int, ranks: int, local: int) -> Split:
    """Bytes of a dispatcher that sends a token only once to each domain and rank (HybridEP, DeepEP).

    The experts of a token are assumed to be drawn evenly. The all-to-all dispatcher sends all `topk` copies.
    """
    domains = ranks / local

    def reached(places: float) -> float:
        """Mean number of places that topk draws reach."""
        return places * (1 - (1 - 1 / places) ** topk)

    nvlink = reached(ranks) * (local - 1) / ranks / (topk * (local - 1) / ranks) if local > 1 else 1.0
    network = (
        reached(domains) * (domains - 1) / domains / (topk * (ranks - local) / ranks) if domains > 1 else 1.0
    )
    return replace(whole, nvlink=whole.nvlink * nvlink, network=whole.network * network)
