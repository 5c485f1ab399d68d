"""Bytes of weights, gradients and optimizer on each rank, in closed form, from the table of tensors.

Under LoRA only the adapters have gradients and an optimizer.

Counted by layer kind, for a mean rank of its data-parallel groups. Padding of the distributed optimizer's
buffers is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.architecture import VOCAB_DIVISOR, vocab_divisor
from megatron_nemotron3.launch.layout import cut_pattern
from megatron_nemotron3.launch.plan.flops import resolve, symbols
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.models import LoRASettings, Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.tensors import PARAMETER, Row, rows_of, symbol_sizes

#: Sizes that divide the parameters of a layer: tensor, expert-tensor and expert parallel.
Grid = tuple[int, int, int]


def grid_of(layout: ParallelLayout) -> Grid:
    """Return (tp, etp, ep) of a layout."""
    return layout.tp, layout.etp, layout.ep


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


def part_rows(config: Nemotron3Config, part: str) -> tuple[Row, ...]:
    """The rows of a part of the table of tensors, the "model" part divided into its three tensors."""
    model = dict(zip(("embedding", "final_norm", "output_layer"), rows_of(config, "model"), strict=True))
    return (model[part],) if part in model else rows_of(config, part)


def held_elements(row: Row, grid: Grid, sizes: dict[str, int]) -> tuple[int, int, bool]:
    """(elements of one parameter of a row on a rank, number of such parameters, whether they are reduced
    over expert-data-parallel ranks only)."""
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
class RankState:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int


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
    for row in (row for part in parts for row in part_rows(config, part)):
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


def named_layers(config: Nemotron3Config, patterns: tuple[str, ...], stage: int) -> Iterator[tuple[str, str]]:
    """(name in the whole model, symbol) of a stage's layers; MTP's blocks and layers are on the last."""
    first = list(accumulate(map(len, patterns), initial=0))[stage]
    for layer, kind in enumerate(patterns[stage], first):
        yield f"decoder.layers.{layer}", kind
    if stage == len(patterns) - 1 and config.has_mtp:
        for block in range(config.mtp_num_blocks):
            yield f"mtp.layers.{block}", "mtp_in"
            for layer, kind in enumerate(config.mtp_pattern or ""):
                yield f"mtp.layers.{block}.mtp_model_layer.layers.{layer}", kind


def has_adapter(lora: LoRASettings, layer: str, row: Row) -> bool:
    """Whether the weight of a row in the layer of this name gets an adapter (`layers.lora`)."""
    return row.linear is not None and lora.matches(f"{layer}.{row.modules[0]}")


def adapter_elements(row: Row, lora: LoRASettings, grid: Grid, sizes: dict[str, int]) -> Elements:
    """Elements of the adapters of a row on a rank: A [dim, input] and B [output, dim].

    Of a column-parallel linear B is divided, of a row-parallel one A. Experts divide `dim`.
    """
    rows, columns = (sizes[symbol] for symbol in row.spelling(PARAMETER).tensors[0].shape)
    a, b = lora.dim * columns, lora.dim * rows
    tp, etp, _ = grid
    if row.routed:
        _, copies, own_groups = held_elements(row, grid, sizes)
        held = copies * (a + b) // etp
        return Elements(expert=held) if own_groups else Elements(dense=held)
    if row.tp == "replicated":
        return Elements(dense=a + b, replicated=a + b)
    whole, divided = (b, a) if row.tp == "row" else (a, b)
    return Elements(dense=whole + divided // tp, replicated=whole)


def adapted_rows(launch: Launch, stage: int, lora: LoRASettings) -> Iterator[tuple[Row, dict[str, int]]]:
    """Rows of a stage, of weights that get an adapter, with the sizes of their layers' symbols."""
    patterns = stage_patterns(launch.config, launch.layout.stages, launch.seq_length)
    for name, symbol in named_layers(launch.config, patterns, stage):
        config, part = resolve(launch.config, symbol)
        for row in rows_of(config, part):
            if has_adapter(lora, name, row):
                yield row, symbol_sizes(config)


def require_divisible(launch: Launch, lora: LoRASettings) -> None:
    """Raise ValueError if experts get adapters that their tensor-parallel ranks cannot divide."""
    stages = range(launch.layout.stages)
    if any(row.routed for stage in stages for row, _ in adapted_rows(launch, stage, lora)):
        lora.require_expert_tp(launch.layout.etp)


def stage_adapters(launch: Launch, pp_rank: int, lora: LoRASettings) -> Elements:
    """Elements of the adapters that one rank holds of all stages of a pipeline rank."""
    layout, grid = launch.layout, grid_of(launch.layout)
    total = Elements()
    for stage in range(pp_rank, layout.stages, layout.pp):
        for row, sizes in adapted_rows(launch, stage, lora):
            total += adapter_elements(row, lora, grid, sizes)
    return total


def state(launch: Launch, pp_rank: int = 0, options: CostOptions | None = None) -> RankState:
    """What a mean rank of a pipeline rank's data-parallel groups holds between steps, without padding.

    Args:
        options: `CostOptions.of(launch)`, if it is known.
    """
    layout, options = launch.layout, options or CostOptions.of(launch)
    held = trained = stage_elements(launch, pp_rank)
    if options.lora is not None:
        trained = stage_adapters(launch, pp_rank, options.lora)
        held += trained
    owned = float(trained.dense + trained.expert)
    dense = expert = 1
    if launch.distributed_optimizer:
        owned = trained.dense / (layout.dp * layout.cp) + trained.expert / layout.edp
    if options.fsdp:  # divided inside an instance; the optimizer over all of them
        dense, expert = (max(1, n // options.instances) for n in (layout.dp * layout.cp, layout.edp))
    return RankState(
        weights=round((held.dense / dense + held.expert / expert) * options.weight),
        gradients=round((trained.dense / dense + trained.expert / expert) * options.gradient),
        optimizer=round(owned * (options.master + options.moments)),
    )
