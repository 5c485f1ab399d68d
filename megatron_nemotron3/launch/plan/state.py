"""Bytes of weights, gradients and optimizer on each rank, in closed form, from the table of tensors.

`state` is exact: padding and a rank's share of the distributed optimizer depend on the order of registration.
`approximate_state` counts by layer kind, for thousands of layouts; it leaves out that padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.architecture import VOCAB_DIVISOR, vocab_divisor
from megatron_nemotron3.launch.layout import cut_pattern
from megatron_nemotron3.launch.plan.kinds import resolve, symbols
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.tensors import PARAMETER, Row, registered, rows_of, symbol_sizes

#: Megatron starts every parameter of a distributed optimizer's buffer at a multiple of this many elements,
#: and ends a bucket at a multiple of the least common multiple of the ranks and `BUCKET_END`.
PARAMETER_START, BUCKET_END = 64, 128


#: Sizes that divide the parameters of a layer: tensor, expert-tensor and expert parallel.
Grid = tuple[int, int, int]


def grid_of(layout: ParallelLayout) -> Grid:
    """Return (tp, etp, ep) of a layout."""
    return layout.tp, layout.etp, layout.ep


@dataclass(frozen=True)
class RankParameter:
    """A parameter of one rank. expert: its gradient is reduced over expert-data-parallel ranks only."""

    name: str
    elements: int
    expert: bool


def padded_vocab_size(config: Nemotron3Config, layout: ParallelLayout) -> int:
    """Rows of the embedding table over all tensor ranks, with the divisor that our flags give."""
    multiple = (vocab_divisor(config, layout) or VOCAB_DIVISOR) * layout.tp
    return -(-config.vocab_size // multiple) * multiple


@lru_cache(maxsize=65536)
def stage_patterns(config: Nemotron3Config, stages: int, seq_length: int) -> tuple[str, ...]:
    """The layers of each stage as `kinds.symbols`, as our flags cut the pattern for this sequence length."""
    left, found = symbols(config), []
    for stage in _pattern.parse(cut_pattern(config, ParallelLayout(pp=stages), seq_length)).stages:
        found.append(left[: len(stage)])
        left = left[len(stage) :]
    return tuple(found)


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
        for row in registered(_part_rows(own, kind)):
            elements, copies, expert = held_elements(row, grid_of(layout), sizes)
            name = row.spelling(PARAMETER).tensors[0].name
            found += [RankParameter(name, elements, expert)] * copies
    return found


def _part_rows(config: Nemotron3Config, part: str) -> tuple[Row, ...]:
    """The rows of a part of the table of tensors, the "model" part divided into its three tensors."""
    model = dict(zip(("embedding", "final_norm", "output_layer"), rows_of(config, "model"), strict=True))
    return (model[part],) if part in model else rows_of(config, part)


def held_elements(row: Row, grid: Grid, sizes: dict[str, int]) -> tuple[int, int, bool]:
    """(elements of one parameter of a row on a rank, number of such parameters, `RankParameter.expert`)."""
    if not row.trainable:
        return 0, 0, False  # a buffer that no optimizer sees
    tp, etp, ep = grid
    ranks = etp if row.routed else tp
    shape = row.spelling(PARAMETER).tensors[0].shape
    elements = math.prod(sizes[symbol] for symbol in shape) // (1 if row.tp == "replicated" else ranks)
    # Experts on another grid than everything else are reduced over groups of their own.
    own_groups = row.routed and (ep > 1 or etp != tp)
    return elements, sizes["experts"] // ep if row.routed else 1, own_groups


@dataclass(frozen=True)
class Bytes:
    """Bytes of a parameter (`weight`), and of what training with Adam adds for it.

    gradient: of its accumulation. master: of the optimizer's own copy, 0 where the parameter is FP32 itself.
    moments: of both moments.
    """

    weight: int
    gradient: int
    master: int
    moments: int


@dataclass(frozen=True)
class RankState:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def bytes_of(launch: Launch) -> Bytes:
    """The bytes of a launch's precision and options (`--grad-reduce-in-bf16`, precision-aware optimizer)."""
    if launch.precision == "fp32":
        return Bytes(4, gradient=2 if "--grad-reduce-in-bf16" in launch.extra else 4, master=0, moments=8)
    options = CostOptions.of(launch)
    return Bytes(2, options.gradient, options.master, options.moments)


def state(launch: Launch, *, pp_rank: int = 0, dp_rank: int = 0, edp_rank: int = 0) -> RankState:
    """What one rank holds between steps, padding included, gradients in one bucket.

    With overlapped gradient reduction there are several buckets, each padded by less than
    lcm(ranks, 128) elements.
    """
    layout, sizes = launch.layout, bytes_of(launch)
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


@dataclass(frozen=True)
class Elements:
    """Elements of a rank's parameters.

    dense: reduced over data ranks. expert: reduced over the copies of the experts. replicated: the part of
    dense that every tensor rank holds whole.
    """

    dense: int = 0
    expert: int = 0
    replicated: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.dense + other.dense, self.expert + other.expert, self.replicated + other.replicated
        )

    def __mul__(self, times: int) -> Elements:
        return Elements(self.dense * times, self.expert * times, self.replicated * times)


@lru_cache(maxsize=4096)
def kind_elements(config: Nemotron3Config, kind: str, grid: Grid) -> Elements:
    """Elements of one layer of a kind, or of "embedding", "output" (with the final norm) or "mtp" (one stored
    block without its layers)."""
    config, kind = resolve(config, kind)
    sizes = symbol_sizes(config, padded_vocab_size(config, ParallelLayout(tp=grid[0])))
    parts = {"output": ("final_norm", "output_layer"), "mtp": ("mtp_in", "mtp_out")}.get(kind, (kind,))
    total = Elements()
    for row in (row for part in parts for row in _part_rows(config, part)):
        each, copies, expert = held_elements(row, grid, sizes)
        held = each * copies
        if expert:
            total += Elements(expert=held)
        else:
            total += Elements(dense=held, replicated=held if row.tp == "replicated" else 0)
    return total


@lru_cache(maxsize=65536)
def _rank_elements(
    config: Nemotron3Config, grid: Grid, pipeline: tuple[int, int, int], seq_length: int
) -> Elements:
    """`stage_elements` for a place in the pipeline (pp, vpp, pp_rank)."""
    pp, vpp, pp_rank = pipeline
    total = Elements()
    pattern = "".join(stage_patterns(config, pp * vpp, seq_length)[pp_rank::pp])
    first, last = pp_rank == 0, pp_rank == pp - 1
    times = {kind: pattern.count(kind) for kind in dict.fromkeys(pattern)}
    # MTP embeds the next tokens itself, so its stage holds the embedding table, too.
    times["embedding"] = int(first or (last and config.has_mtp))
    times["output"] = int(last)
    for kind in (*(config.mtp_pattern or ""), "mtp") if last and config.has_mtp else ():
        times[kind] = times.get(kind, 0) + config.mtp_num_blocks
    for kind, number in times.items():
        if number:
            total += kind_elements(config, kind, grid) * number
    return total


def stage_elements(launch: Launch, pp_rank: int) -> Elements:
    """Elements that one rank holds of all stages of a pipeline rank."""
    layout = launch.layout
    pipeline = (layout.pp, layout.vpp, pp_rank)
    return _rank_elements(launch.config, grid_of(layout), pipeline, launch.seq_length)


def approximate_state(launch: Launch, pp_rank: int = 0) -> RankState:
    """The same as `state`, for a mean rank of its data-parallel groups and without padding."""
    layout, sizes = launch.layout, bytes_of(launch)
    held = stage_elements(launch, pp_rank)
    whole, owned = held.dense + held.expert, float(held.dense + held.expert)
    if launch.distributed_optimizer:
        owned = held.dense / (layout.dp * layout.cp) + held.expert / layout.edp
    options, kept = CostOptions.of(launch), float(whole)
    if options.fsdp:  # divided inside an instance; the optimizer over all of them
        dense, expert = (max(1, n // options.instances) for n in (layout.dp * layout.cp, layout.edp))
        kept = held.dense / dense + held.expert / expert
    return RankState(
        weights=round(kept * sizes.weight),
        gradients=round(kept * sizes.gradient),
        optimizer=round(owned * (sizes.master + sizes.moments)),
    )
