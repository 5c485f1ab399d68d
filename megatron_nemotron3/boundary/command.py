"""`nemotron3 plan boundary`: print the transfer plan between two layouts. Needs no GPU and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import TransferPlan, make_plan, slices_of
from megatron_nemotron3.boundary.traffic import LINES, describe, explain
from megatron_nemotron3.common.options import NEEDED, add_command, flag, json_flag, option
from megatron_nemotron3.common.output import count, print_json

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Limits beyond which a table is unreadable and slow to make.
MOST_RANKS = 16384
MOST_SAMPLES = 1_000_000
ROWS_PER_SAMPLE = 256


_LAYOUT = "tp=,cp=,pp=,dp=,offset= and sp, separated by commas"
_rows = partial(option, group="rows of a microbatch")


@dataclass(frozen=True, kw_only=True)
class BoundaryOptions:
    """Options of `nemotron3 plan boundary`."""

    source: str = option(
        f"layout of the sender (the encoder): {_LAYOUT}; with cp= also share=media, zigzag or contiguous",
        "LAYOUT",
        default=NEEDED,
        spelling="--from",
    )
    destination: str = option(
        "layout of the receiver (the language model), in the same form; "
        "without offset= its ranks follow those of the encoder",
        "LAYOUT",
        default=NEEDED,
        spelling="--to",
    )
    rows: str | None = _rows(
        "rows per sample of a microbatch, over all lanes; N+N for several media in a sample", "N,N,…"
    )
    samples: int | None = _rows("number of samples (default: the minimum)", "N", least=1)
    rows_per_sample: int | None = _rows(f"rows per sample (default {ROWS_PER_SAMPLE})", "N", least=0)
    seq_length: int | None = _rows(
        "tokens per sequence, if --to has cp= or sp; rows come first (default: the minimum)", "N", least=1
    )
    hidden: int = _rows("row width (default 2688)", "N", default=2688, least=1)
    dtype: str = _rows("row dtype (default bfloat16)", default="bfloat16", choices=DTYPES)
    backward: bool = flag("plan the transfer of the gradients")
    lines: int = option(f"number of lines per table (default {LINES})", "N", default=LINES, least=1)
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 plan boundary`."""
    add_command(commands.add_parser("plan boundary"), BoundaryOptions, boundary)


def boundary(options: BoundaryOptions) -> int:
    """Print the plan. Returns exit status 0."""
    source, destination = _parsed_layouts(options)
    media = _sample_media(options, source, destination)
    rows = [sum(sample) for sample in media]
    plan, length = _forward_plan(options, source, destination, media)
    if options.backward:
        plan = plan.backward
    way = "backward" if options.backward else "forward"
    if options.json:
        facts = {
            "source": str(source),
            "destination": str(destination),
            "direction": way,
            "rows": rows,
            "hidden": options.hidden,
            "dtype": options.dtype,
            "seq_length": length,
        }
        print_json(facts | {"plan": describe(plan)})
        return 0
    for module, layout, stage in (("encoder", source, source.pp - 1), ("language model", destination, 0)):
        lanes = f"{layout.dp:,} data lane{'s' * (layout.dp > 1)}"
        stages = f", at stage {stage} of {layout.pp}" * (layout.pp > 1)
        print(f"{module:<17}{layout}: ranks {layout.offset}-{layout.ranks[-1]}, {lanes}{stages}")
    sizes = f"{min(rows):,}" if min(rows) == max(rows) else f"{min(rows):,} to {max(rows):,}"
    print(
        f"microbatch       {count(len(rows), 'sample')} of {sizes} rows of {plan.row_bytes:,} bytes: "
        f"{sum(rows) * plan.row_bytes:,} bytes"
    )
    if length:
        print(f"sequences        {length:,} positions, rows at the start; each rank wants those it computes")
    print(f"\n{way}, {explain(plan, lines=options.lines)}")
    return 0


def _parsed_layouts(options: BoundaryOptions) -> tuple[Layout, Layout]:
    source, destination = Layout.parse(options.source), Layout.parse(options.destination)
    for layout in (source, destination):
        if layout.size > MOST_RANKS:
            raise ValueError(f"layout {layout} has {layout.size:,} ranks: use {MOST_RANKS:,} at most")
    if "offset" not in options.destination:
        offset = source.offset + source.size
        destination = Layout(destination.dimensions, offset, destination.sequence_parallel)
    return source, destination


def _sample_media(options: BoundaryOptions, source: Layout, destination: Layout) -> list[list[int]]:
    """Rows of each medium of each sample."""
    if options.rows is None:
        count = options.samples or math.lcm(source.dp, destination.dp)
        each = ROWS_PER_SAMPLE if options.rows_per_sample is None else options.rows_per_sample
        if count > MOST_SAMPLES:
            raise ValueError(
                f"{count:,} samples (DP={source.dp} and DP={destination.dp}): use {MOST_SAMPLES:,} at most"
            )
        return [[each]] * count
    if options.samples is not None or options.rows_per_sample is not None:
        raise ValueError("--rows gives all row counts: leave out --samples and --rows-per-sample")
    samples = [[number.strip() for number in sample.split("+")] for sample in options.rows.split(",")]
    if wrong := [n for sample in samples for n in sample if not (n.isascii() and n.isdecimal())]:
        raise ValueError(
            f"--rows: {wrong[0]!r} is not a number of rows: use integers from 0, separated by commas"
        )
    return [[int(number) for number in sample] for sample in samples]


def _forward_plan(
    options: BoundaryOptions, source: Layout, destination: Layout, media: list[list[int]]
) -> tuple[TransferPlan, int | None]:
    """The forward plan, and the sequence length if the destination cuts sequences."""
    rows = [sum(sample) for sample in media]
    row_bytes = options.hidden * DTYPES[options.dtype]
    if not destination.sliced:
        if options.seq_length is not None:
            raise ValueError(
                f"--seq-length {options.seq_length}: {destination} does not cut sequences: leave it out, or "
                "give cp= or sp"
            )
        return make_plan(source, destination, rows, row_bytes=row_bytes, media=media), None
    multiple = 2 * destination.cp * destination.tp
    length = options.seq_length or max(-(-max(rows) // multiple), 1) * multiple
    slices = slices_of(destination, [((0, n),) if n else () for n in rows], [length] * len(rows))
    return make_plan(source, destination, rows, row_bytes=row_bytes, slices=slices, media=media), length
