"""Bytes of weights, gradients and optimizer on each rank, in closed form. Standard library only.

A projection of the table of tensors (`models.tensors`), in the order in which the torch spec registers
parameters: with the distributed optimizer, padding and a rank's share depend on that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.args.architecture import vocab_divisor
from megatron_nemotron3.args.layout import cut_pattern
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.tensors import PARAMETER, Row, registered, rows_of, symbol_sizes

#: Megatron starts every parameter of a distributed optimizer's buffer at a multiple of this many elements,
#: and ends a bucket at a multiple of the least common multiple of the ranks and `BUCKET_END`.
PARAMETER_START, BUCKET_END = 64, 128
_VOCAB_DIVISOR = 128


@dataclass(frozen=True)
class Parameter:
    """A parameter of one rank. expert: its gradient is reduced over expert-data-parallel ranks only."""

    name: str
    elements: int
    expert: bool


def padded_vocab_size(config: Nemotron3Config, layout: ParallelLayout) -> int:
    """Rows of the embedding table over all tensor ranks, with the divisor our flags give."""
    multiple = (vocab_divisor(config, layout) or _VOCAB_DIVISOR) * layout.tp
    return -(-config.vocab_size // multiple) * multiple


def stage_patterns(
    config: Nemotron3Config, layout: ParallelLayout, seq_length: int | None = None
) -> list[str]:
    """Layers of each of the pp * vpp stages, as our flags cut them."""
    return list(_pattern.parse(cut_pattern(config, layout, seq_length)).stages)


def parameters(
    config: Nemotron3Config, layout: ParallelLayout, stage: int, seq_length: int | None = None
) -> list[Parameter]:
    """A stage's parameters on one rank, in the order of registration.

    Args:
        stage: pipeline stage, 0 to pp * vpp - 1.
        seq_length: on which the cut into stages depends; None: the config's.
    """
    return list(_parameters(config, layout, stage, seq_length))


def _parameters(
    config: Nemotron3Config, layout: ParallelLayout, stage: int, seq_length: int | None
) -> Iterator[Parameter]:
    stages = stage_patterns(config, layout, seq_length)
    first, last = stage == 0, stage == len(stages) - 1
    model = {row.hf[0].name: row for row in rows_of(config, "model")}
    table = symbol_sizes(config, padded_vocab_size(config, layout))
    # MTP embeds the next tokens by itself, so its stage holds the table, too.
    if first or (last and config.has_mtp):
        yield from _of(model["backbone.embeddings.weight"], layout, table)
    for kind in stages[stage]:
        yield from _layer(config, layout, kind, table)
    if last:
        yield from _of(model["backbone.norm_f.weight"], layout, table)
        for _ in range(config.mtp_num_blocks if config.has_mtp else 0):
            for row in rows_of(config, "mtp_in"):
                yield from _of(row, layout, table)
            for kind in config.mtp_pattern or "":
                yield from _layer(config, layout, kind, table)
            for row in rows_of(config, "mtp_out"):
                yield from _of(row, layout, table)
        yield from _of(model["lm_head.weight"], layout, table)


def _layer(
    config: Nemotron3Config, layout: ParallelLayout, kind: str, table: dict[str, int]
) -> Iterator[Parameter]:
    for row in registered(rows_of(config, kind)):
        yield from _of(row, layout, table)


def _of(row: Row, layout: ParallelLayout, table: dict[str, int]) -> Iterator[Parameter]:
    elements, copies, expert = held_elements(row, layout, table)
    name = row.spelling(PARAMETER).tensors[0].name
    for _ in range(copies):
        yield Parameter(name, elements, expert)


def held_elements(row: Row, layout: ParallelLayout, table: dict[str, int]) -> tuple[int, int, bool]:
    """(elements of one of its parameters on a rank, number of them, `Parameter.expert`)."""
    if not row.trainable:
        return 0, 0, False  # a buffer that no optimizer sees
    ranks = layout.etp if row.routed else layout.tp
    shape = row.spelling(PARAMETER).tensors[0].shape
    elements = math.prod(table[symbol] for symbol in shape) // (1 if row.tp == "replicated" else ranks)
    # Experts on another grid than everything else are reduced over groups of their own.
    own_groups = row.routed and (layout.ep > 1 or layout.etp != layout.tp)
    return elements, table["experts"] // layout.ep if row.routed else 1, own_groups


@dataclass(frozen=True)
class Bytes:
    """Bytes of one kind of type. Megatron's defaults for BF16 training with Adam.

    weight: of a parameter. gradient: of its accumulation (`--accumulate-allreduce-grads-in-fp32`). master: of
    the optimizer's own copy, 0 where the parameter is FP32 itself. moments: of both moments.
    """

    weight: int = 2
    gradient: int = 4
    master: int = 4
    moments: int = 8


BF16 = Bytes()
FP32 = Bytes(weight=4, master=0)


@dataclass(frozen=True)
class State:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def state(
    config: Nemotron3Config,
    layout: ParallelLayout,
    *,
    pp_rank: int = 0,
    dp_rank: int = 0,
    edp_rank: int = 0,
    sizes: Bytes = BF16,
    distributed_optimizer: bool = True,
    seq_length: int | None = None,
) -> State:
    """What one rank holds between steps, padding included, gradients in one bucket.

    With overlapped gradient reduction there are several buckets, each padded by less than
    lcm(ranks, 128) elements.

    Args:
        pp_rank, dp_rank, edp_rank: the rank in its pipeline, data (context ranks included) and expert-data
            groups; the last two choose its share of the optimizer.
        distributed_optimizer: `--use-distributed-optimizer`.
        seq_length: on which the cut into stages depends; None: the config's.
    """
    weights = gradients = optimizer = 0
    for stage in range(pp_rank, layout.stages, layout.pp):
        mine = parameters(config, layout, stage, seq_length)
        groups = ((False, layout.dp * layout.cp, dp_rank), (True, layout.edp, edp_rank))
        for expert, ranks, rank in groups:
            elements = [p.elements for p in mine if p.expert is expert]
            if not elements:
                continue
            held, owned = sum(elements), sum(elements)
            if distributed_optimizer:
                held, owned = _shared(elements, ranks, rank)
            weights += held * sizes.weight
            gradients += held * sizes.gradient
            optimizer += owned * (sizes.master + sizes.moments)
    return State(weights, gradients, optimizer)


def _shared(elements: list[int], ranks: int, rank: int) -> tuple[int, int]:
    """(elements of the buffer, elements that this rank's share of it has of parameters)."""
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
