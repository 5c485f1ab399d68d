"""Parameters of a rank by layer kind: counts without names and padding, for comparing thousands of layouts.

Standard library only. `state` is the exact form, parameter by parameter, padding included; what is left out
here is below 64 elements a parameter and one bucket's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import Row, rows_of, symbol_sizes
from megatron_nemotron3.plan.state import (
    BF16,
    Bytes,
    State,
    held_elements,
    padded_vocab_size,
    stage_patterns,
)


@dataclass(frozen=True)
class Elements:
    """Parameters of a rank. dense: reduced over data ranks. expert: over copies of the experts. replicated:
    those of dense that every tensor rank holds whole."""

    dense: int = 0
    expert: int = 0
    replicated: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.dense + other.dense, self.expert + other.expert, self.replicated + other.replicated
        )

    def __mul__(self, times: int) -> Elements:
        return Elements(self.dense * times, self.expert * times, self.replicated * times)


@lru_cache(maxsize=65536)
def cut(config: Nemotron3Config, stages: int, seq_length: int) -> tuple[str, ...]:
    """Layers of each stage, as our flags cut them."""
    return tuple(stage_patterns(config, ParallelLayout(pp=stages), seq_length))


@lru_cache(maxsize=4096)
def kind_elements(config: Nemotron3Config, kind: str, tp: int, etp: int, ep: int) -> Elements:
    """Of one layer of a kind, or of "embedding", "output" (with the final norm) or "mtp" (what one stored
    block has beside its layers)."""
    layout = ParallelLayout(tp=tp, etp=etp, ep=ep)
    table = symbol_sizes(config, padded_vocab_size(config, layout))
    total = Elements()
    for row in _rows(config, kind):
        each, copies, expert = held_elements(row, layout, table)
        held = each * copies
        if expert:
            total += Elements(expert=held)
        else:
            total += Elements(dense=held, replicated=held if row.tp == "replicated" else 0)
    return total


def _rows(config: Nemotron3Config, kind: str) -> list[Row]:
    if kind == "mtp":
        return [*rows_of(config, "mtp_in"), *rows_of(config, "mtp_out")]
    if kind in ("embedding", "output"):
        embeds = {row: row.hf[0].name == "backbone.embeddings.weight" for row in rows_of(config, "model")}
        return [row for row, is_embedding in embeds.items() if is_embedding == (kind == "embedding")]
    return list(rows_of(config, kind))


@lru_cache(maxsize=65536)
def _stages(
    config: Nemotron3Config, tp: int, etp: int, ep: int, pp: int, vpp: int, pp_rank: int, seq_length: int
) -> Elements:
    total = Elements()
    pattern = "".join(cut(config, pp * vpp, seq_length)[pp_rank::pp])
    first, last = pp_rank == 0, pp_rank == pp - 1
    times = {kind: pattern.count(kind) for kind in dict.fromkeys(pattern)}
    # MTP embeds the next tokens by itself, so its stage holds the table, too.
    times["embedding"] = int(first or (last and config.has_mtp))
    times["output"] = int(last)
    for kind in (*(config.mtp_pattern or ""), "mtp") if last and config.has_mtp else ():
        times[kind] = times.get(kind, 0) + config.mtp_num_blocks
    for kind, number in times.items():
        if number:
            total += kind_elements(config, kind, tp, etp, ep) * number
    return total


def stage_elements(
    config: Nemotron3Config, layout: ParallelLayout, pp_rank: int, seq_length: int | None = None
) -> Elements:
    """Of one rank of a pipeline rank's stages, cut for sequences of `seq_length` (None: the config's)."""
    at = (layout.tp, layout.etp, layout.ep, layout.pp, layout.vpp)
    return _stages(config, *at, pp_rank, seq_length or config.seq_length)


def approximate_state(
    config: Nemotron3Config,
    layout: ParallelLayout,
    pp_rank: int = 0,
    *,
    sizes: Bytes = BF16,
    distributed_optimizer: bool = True,
    seq_length: int | None = None,
) -> State:
    """As `state.state` of a mean rank of its data-parallel groups, without padding."""
    held = stage_elements(config, layout, pp_rank, seq_length)
    whole, owned = held.dense + held.expert, float(held.dense + held.expert)
    if distributed_optimizer:
        owned = held.dense / (layout.dp * layout.cp) + held.expert / layout.edp
    return State(
        weights=whole * sizes.weight,
        gradients=whole * sizes.gradient,
        optimizer=round(owned * (sizes.master + sizes.moments)),
    )
