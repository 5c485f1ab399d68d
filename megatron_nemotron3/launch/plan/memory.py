"""Everything that one rank holds at the worst moment of a step, in closed form.

What is counted and what is not, term by term: docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.plan.activation_forms import FLOAT, RankShare, moe_backward
from megatron_nemotron3.launch.plan.activations import PACKED, decoder_shares, stage_bytes
from megatron_nemotron3.launch.plan.flops import expert_configs, expert_layers, resolve, symbols
from megatron_nemotron3.launch.plan.options import NATIVE
from megatron_nemotron3.launch.plan.state import (
    Grid,
    grid_of,
    held_elements,
    kind_elements,
    stage_patterns,
    state,
)
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import rows_of, symbol_sizes
from megatron_nemotron3.precision.formats import BF16

#: Layers that Megatron-FSDP holds whole at once: the one in use, and the next.
_GATHERED = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the worst moment of a step. docs/plan.md says what is not included.

    activations: by layer kind, of all microbatches in flight.
    recompute_peak: what recomputing one module or run of layers adds to that. By then the backward of the
        loss and of the later layers is over, and what they held is free.
    buffers: the sum of `buffers`, and what the backward of routed experts adds (`activation_forms`).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: dict[str, int]
    recompute_peak: int
    buffers: int
    packed_weights: int = 0

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer
        return (
            state + sum(self.activations.values()) + self.recompute_peak + self.buffers + self.packed_weights
        )


def memory(
    launch: Launch, pp_rank: int = 0, *, imbalance: float = 1.0, share: RankShare | None = None
) -> RankMemory:
    """What one rank holds at the worst moment of a step.

    Args:
        launch: recomputation and the type of gradients come from its `extra`.
        imbalance: as for `activations.layer_activations`.
        share: `RankShare.of(launch, imbalance)`, if it is known.

    Raises:
        ValueError: no such rank, or fewer layers than stages.
    """
    config, layout = launch.config, launch.layout
    share = share or RankShare.of(launch, imbalance)
    patterns = stage_patterns(config, layout.stages, launch.seq_length)
    experts = expert_configs(config, symbols(config) + (config.mtp_pattern or ""))
    work = max((moe_backward(own, share, layout.ep) for own in experts), default=0)
    chunks = [
        stage_bytes(config, share, patterns, stage, work)
        for stage in range(pp_rank, layout.stages, layout.pp)
    ]
    weights = [sum(kinds.values()) for kinds, *_ in chunks] if layout.vpp > 1 else ()
    activations: dict[str, int] = {}
    held_at_once = in_flight(layout, pp_rank, launch.microbatches, weights)
    for times, (kinds, *_) in zip(held_at_once, chunks, strict=True):
        for kind, number in kinds.items():
            activations[kind] = activations.get(kind, 0) + times * number
    held = state(launch, pp_rank, share.options)
    packed_weights, replaced = _packed_weights(launch, share, "".join(patterns[pp_rank :: layout.pp]))
    return RankMemory(
        weights=held.weights - replaced,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=activations,
        recompute_peak=max(again for _, again, _ in chunks),
        buffers=max(more for _, _, more in chunks) + sum(buffers(launch, share, pp_rank).values()),
        packed_weights=packed_weights,
    )


def _packed_weights(launch: Launch, share: RankShare, pattern: str) -> tuple[int, int]:
    """Bytes of the packed copies of all weights, and of the BF16 weights that they replace."""
    if not (share.te and launch.quantized):
        return 0, 0
    grid, copies, replaced = grid_of(launch.layout), 0, 0
    for kind in set(pattern):
        one = weight_copies(launch.config, kind, launch.precision, grid, share.options.bf16)
        times = min(pattern.count(kind), _GATHERED) if share.options.fsdp else pattern.count(kind)
        copies += times * one
        if share.options.packed_weights and not share.options.fsdp:
            each = PACKED[launch.precision] if launch.precision in PACKED else PACKED["bf16"]
            replaced += round(times * one / (2 * each) * PACKED["bf16"])
    return copies, replaced


@lru_cache(maxsize=4096)
def weight_copies(
    config: Nemotron3Config, kind: str, precision: str, grid: Grid, kept: tuple[int, int] | None = None
) -> int:
    """Mean bytes of the packed copies of a decoder layer's weights on a rank; `kind` is a symbol.

    Transformer Engine packs the weight of a quantized linear along both axes, and keeps the copies from the
    first microbatch of a step to the next step. Derived from its modules, not measured.
    """
    config, kind = resolve(config, kind)
    shares, total = decoder_shares(config, precision, kept), 0.0
    for row in rows_of(config, kind):
        quantized = {f: share for f, share in shares.get(row.linear or "", {}).items() if f != BF16}
        for format, share in quantized.items():
            elements, copies, _ = held_elements(row, grid, symbol_sizes(config))
            total += 2 * PACKED[format] * elements * copies * share
    return round(total)


def buffers(launch: Launch, share: RankShare, pp_rank: int) -> dict[str, int]:
    """Bytes that exist while a microbatch is computed and that no saved tensor holds, by purpose.

    sequence gather: the input of a column-parallel linear, gathered from all TP ranks in Megatron's buffer.
    expert exchange: the rows that a rank sends to experts, and those that it receives before it sorts them.
    routing: probabilities and map [tokens, experts] of the last microbatch, which every dispatcher keeps.
    pipeline: one tensor received and one sent in each direction; interleaved, twice as many.
    logits: in the model's precision, without what the loss keeps. Megatron's fused loss also holds them in
    FP32, before and after their maximum is subtracted (the second: inferred from the memory of published
    runs). gathered layers: with Megatron-FSDP, weights and gradients of the largest layers in use, and the
    tables.
    """
    config, layout = launch.config, launch.layout
    patterns = stage_patterns(config, layout.stages, launch.seq_length)
    kinds = "".join(patterns[pp_rank :: layout.pp])
    last = pp_rank == layout.pp - 1
    if last:
        kinds += config.mtp_pattern or ""
    d, found = config.hidden_size, {}
    if share.sequence_parallel:
        found["sequence gather"] = share.inner(2 * d if last and config.has_mtp else d)
    routed = expert_configs(config, kinds)
    if routed and layout.ep > 1:
        copies = max(own.moe_router_topk or 0 for own in routed)
        sent = share.shard * copies * config.expert_input_size * share.element
        found["expert exchange"] = sent + round(sent * layout.etp * share.imbalance)
    if routed:
        layers = expert_layers("".join(patterns[pp_rank :: layout.pp]))
        layers += (config.mtp_pattern or "").count("E") * config.mtp_num_blocks if last else 0
        found["routing"] = layers * share.shard * (config.num_moe_experts or 0) * (FLOAT + 1)
    if layout.pp > 1:
        found["pipeline"] = (4 if layout.vpp > 1 else 2) * share.stream(d)
    if last:
        copies = share.element if share.element == 2 else 0
        copies += 2 * FLOAT if share.options.loss == NATIVE else 0
        found["logits"] = share.tokens * (share.padded_vocab // layout.tp) * copies
    if share.options.fsdp:
        whole = [kind_elements(config, kind, grid_of(layout)) for kind in set(kinds)]
        tables = kind_elements(config, "output", grid_of(layout))
        elements = _GATHERED * max(held.dense + held.expert for held in whole) + 2 * tables.dense
        found["gathered layers"] = elements * (share.options.weight + share.options.gradient)
    return found


def in_flight(
    layout: ParallelLayout, pp_rank: int, microbatches: int, weights: Sequence[float] = ()
) -> tuple[int, ...]:
    """Microbatches whose activations a pipeline rank holds at the worst moment, for each of its vpp chunks.

    1F1B: a rank first runs pp - rank - 1 forward passes, then alternates forward and backward. So it holds
    pp - rank microbatches. Interleaved (vpp > 1): the unit is one microbatch in one of the rank's vpp chunks.
    The rank first runs 2 * (pp - rank - 1) + (vpp - 1) * pp of them; forward takes pp microbatches through a
    chunk before the next chunk, and backward does so from the last chunk on. These are Megatron 0.19's
    schedules.
    """
    if not 0 <= pp_rank < layout.pp or microbatches < 1:
        raise ValueError(
            f"pp_rank={pp_rank} of PP={layout.pp}, microbatches={microbatches}: use 0 to {layout.pp - 1}, "
            "and 1 microbatch or more"
        )
    if layout.pp == 1:
        return (1,)
    if layout.vpp == 1:
        return (min(layout.pp - pp_rank, microbatches),)
    # With more microbatches than this the schedule repeats itself.
    enough = 4 * layout.pp
    if microbatches > enough:
        microbatches = enough + microbatches % layout.pp
    moments = _held_states(layout.pp, layout.vpp, pp_rank, microbatches)
    if not weights:
        return max(moments, key=sum)
    return max(moments, key=lambda counts: sum(n * w for n, w in zip(counts, weights, strict=True)))


@lru_cache(maxsize=4096)
def _held_states(pp: int, vpp: int, rank: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches held after each forward pass: the distinct states that no other state exceeds."""
    total = microbatches * vpp
    first = min(2 * (pp - rank - 1) + (vpp - 1) * pp, total)
    order: list[int] = []  # the chunk of each forward pass
    for start in range(0, microbatches, pp):
        group = min(pp, microbatches - start)
        order += [chunk for chunk in range(vpp) for _ in range(group)]
    held = [0] * vpp
    found: dict[tuple[int, ...], None] = {}
    for step, chunk in enumerate(order):
        held[chunk] += 1
        found[tuple(held)] = None
        if step >= first:
            held[vpp - 1 - order[step - first]] -= 1
    return tuple(
        counts
        for counts in found
        if not any(other != counts and all(map(int.__ge__, other, counts)) for other in found)
    )
