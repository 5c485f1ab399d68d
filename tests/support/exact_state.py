"""Bytes of a rank's weights, gradients and optimizer, parameter by parameter, as Megatron lays them out.

`plan.state` counts by layer kind and leaves out padding and where a rank's share of the distributed optimizer
ends; this counts both. test_state.py compares it with built models to the byte, other tests the plan with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.plan.flops import resolve
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.launch.plan.state import (
    RankState,
    grid_of,
    held_elements,
    padded_vocab_size,
    part_rows,
    stage_patterns,
)
from megatron_nemotron3.models.tensors import PARAMETER, registered, symbol_sizes

#: Megatron starts every parameter of a distributed optimizer's buffer at a multiple of this many elements,
#: and ends a bucket at a multiple of the least common multiple of the ranks and `BUCKET_END`.
PARAMETER_START, BUCKET_END = 64, 128


@dataclass(frozen=True)
class RankParameter:
    """A parameter of one rank. expert: its gradient is reduced over expert-data-parallel ranks only."""

    name: str
    elements: int
    expert: bool


def parameters(launch: Launch, stage: int) -> list[RankParameter]:
    """The parameters of a stage on one rank, in the order of registration."""
    config, layout = launch.config, launch.layout
    stages = stage_patterns(config, layout.stages, launch.seq_length)
    last = stage == len(stages) - 1
    vocab = padded_vocab_size(config, layout)
    # MTP embeds the next tokens itself, so its stage holds the embedding table, too.
    parts = ["embedding"] if stage == 0 or (last and config.has_mtp) else []
    parts += stages[stage]
    if last:
        block = ["mtp_in", *(config.mtp_pattern or ""), "mtp_out"]
        parts += ["final_norm", *block * config.mtp_num_blocks, "output_layer"]
    found: list[RankParameter] = []
    for part in parts:
        own, kind = resolve(config, part)
        sizes = symbol_sizes(own, vocab)
        for row in registered(part_rows(own, kind)):
            elements, copies, expert = held_elements(row, grid_of(layout), sizes)
            name = row.spelling(PARAMETER).tensors[0].name
            found += [RankParameter(name, elements, expert)] * copies
    return found


def exact_state(launch: Launch, *, pp_rank: int = 0, dp_rank: int = 0, edp_rank: int = 0) -> RankState:
    """What one rank holds between steps, padding included, gradients in one bucket.

    With overlapped gradient reduction there are several buckets, each padded by less than
    lcm(ranks, 128) elements.
    """
    layout, sizes = launch.layout, CostOptions.of(launch)
    weights = gradients = optimizer = 0
    for stage in range(pp_rank, layout.stages, layout.pp):
        mine = parameters(launch, stage)
        groups = ((False, layout.dp * layout.cp, dp_rank), (True, layout.edp, edp_rank))
        for expert, ranks, rank in groups:
            elements = [p.elements for p in mine if p.expert is expert]
            if not elements:
                continue
            held, owned = sum(elements), sum(elements)
            if launch.distributed_optimizer:
                held, owned = _optimizer_share(elements, ranks, rank)
            weights += held * sizes.weight
            gradients += held * sizes.gradient
            optimizer += owned * (sizes.master + sizes.moments)
    return RankState(weights, gradients, optimizer)


def _optimizer_share(elements: list[int], ranks: int, rank: int) -> tuple[int, int]:
    """(elements of the buffer, elements of parameters in this rank's share of it)."""
    spans, end = [], 0
    for number in reversed(elements):  # Megatron fills buffers from the last parameter on
        start = -(-end // PARAMETER_START) * PARAMETER_START
        end = start + number
        spans.append((start, end))
    multiple = math.lcm(ranks, BUCKET_END)
    held = -(-end // multiple) * multiple
    share = held // ranks
    low, high = rank * share, (rank + 1) * share
    return held, sum(max(0, min(b, high) - max(a, low)) for a, b in spans)
