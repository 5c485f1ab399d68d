"""`precision.csv`: written during a run, a row per measured iteration, linear and tensor; its table.

Columns: docs/nvfp4.md.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.common.output import table

FILE = "precision.csv"
#: Longest report that is read, in bytes.
_LIMIT = 1 << 30
#: Tensors of a linear in the order of reports, and their names for readers.
TENSORS = {
    "fprop.x": "X",
    "fprop.weight": "W",
    "dgrad.dy": "dY",
    "dgrad.weight": "W of dgrad",
    "wgrad.dy": "dY of wgrad",
    "wgrad.x": "X of wgrad",
    "weight_gradient": "weight gradient",
}
GRADIENT = "weight_gradient"


class ReportRow(NamedTuple):
    """One tensor of one linear in one iteration; a layer's experts are one row. Shares are from 0 to 1."""

    iteration: int
    #: "layer_007" (1-based over all pipeline stages), "mtp_1_layer_2", "mtp_layer_2" (all depths), "mtp_1".
    layer: str
    #: Name inside the layer: "mixer.in_proj".
    module: str
    #: "nvfp4" or "mxfp8".
    format: str
    #: A key of `TENSORS`.
    tensor: str
    #: True if the run computed with the quantized values (emulation); False for a plain run.
    used: bool
    #: Over microbatches and ranks. Each rank's replica of a weight counts, each element of a gradient once.
    elements: int
    zeros: float
    flushed: float
    sqnr_db: float
    amax: float
    #: Expert with the largest `flushed` (for a gradient: `zeros`), and its share; -1 without experts.
    worst_expert: int = -1
    worst: float = math.nan


class ReportError(ValueError):
    """The report is missing or malformed."""


def append(folder: str | Path, rows: Iterable[ReportRow]) -> None:
    """Append rows to the file in `folder` in one write; both are created if they are missing."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    lines = [",".join(ReportRow._fields)] if new else []
    lines += [",".join(map(_csv_cell, row)) for row in rows]
    with path.open("a", encoding="ascii") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _csv_cell(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def read(folder: str | Path) -> list[ReportRow]:
    """Read all rows of a report, sorted by iteration; raises ReportError.

    Where a resumed run repeats an iteration, the later rows count. An incomplete last line is skipped: the
    run is still writing, or was killed.
    """
    path = Path(folder) / FILE
    try:
        text = read_outside(path, limit=_LIMIT).decode("ascii")
    except FileNotFoundError:
        raise ReportError(f"{path} does not exist: train with --log-precision") from None
    except UnicodeDecodeError as problem:
        raise ReportError(f"{path} is no precision report: {problem}") from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines or lines[0] != ",".join(ReportRow._fields):
        raise ReportError(
            f"{path}:1 is not the header {','.join(ReportRow._fields)}: not a report of this version"
        )
    found: dict[tuple[int, str, str, str], ReportRow] = {}
    for number, cells in enumerate(csv.reader(lines[1:]), 2):
        try:
            row = _parsed_row(cells)
        except (ValueError, IndexError, TypeError) as problem:
            raise ReportError(f"{path}:{number} is malformed ({problem}): delete the line") from None
        found[row.iteration, row.layer, row.module, row.tensor] = row
    if not found:
        raise ReportError(f"{path} holds no measurement: no linear of the run is NVFP4 or MXFP8")
    return sorted(found.values(), key=lambda row: row.iteration)


def _parsed_row(cells: Sequence[str]) -> ReportRow:
    if len(cells) != len(ReportRow._fields):
        raise ValueError(f"{len(cells)} cells instead of {len(ReportRow._fields)}")
    iteration, layer, module, fmt, tensor, used, elements, *floats, expert, worst = cells
    if tensor not in TENSORS:
        raise ValueError(f"unknown tensor {tensor!r}")
    zeros, flushed, sqnr, amax = (float(cell or "nan") for cell in floats)
    place = (int(iteration), layer, module, fmt, tensor, bool(int(used)), int(elements))
    return ReportRow(*place, zeros, flushed, sqnr, amax, int(expert), float(worst or "nan"))


def last(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows of the last measured iteration."""
    return [row for row in rows if row.iteration == rows[-1].iteration]


def summary(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Yield lines of text: the median and worst layer of each module and tensor at the last measurement."""
    iterations = sorted({row.iteration for row in rows})
    now = last(rows)
    groups = [group for group in _rows_by_tensor(now) if group[0].tensor != GRADIENT]
    yield (
        f"precision at iteration {iterations[-1]} ({len(iterations)} measured from {iterations[0]} on), "
        f"{'as computed' if now[0].used else 'as NVFP4 would compute'}: median layer, worst layer; "
        "layer_001 is decoder.layers.0"
    )
    head = ("module", "format", "tensor", "flushed to zero", "", "SQNR, dB", "", "largest |x|")
    yield from (f"  {line}" for line in table([head, *map(_summary_cells, groups)]))
    yield from _gradient_summary(now)


def _rows_by_tensor(rows: Sequence[ReportRow]) -> list[list[ReportRow]]:
    """Group rows by module, format and tensor, in order of appearance and of `TENSORS`."""
    found: dict[tuple[str, str, str], list[ReportRow]] = {}
    for row in rows:
        found.setdefault((row.module, row.format, row.tensor), []).append(row)
    modules = list(dict.fromkeys(module for module, _, _ in found))
    order = list(TENSORS)
    return [found[key] for key in sorted(found, key=lambda k: (modules.index(k[0]), k[1], order.index(k[2])))]


def _summary_cells(rows: list[ReportRow]) -> tuple[str, ...]:
    cells = ["", "", "", ""]
    if flushed := [row for row in rows if not math.isnan(row.flushed)]:
        worst = max(flushed, key=lambda row: row.flushed)
        cells[0] = f"{statistics.median(row.flushed for row in flushed):.2%}"
        cells[1] = f"{worst.flushed:.2%} {worst.layer}{_worst_expert_text(worst)}"
    if noisy := [row for row in rows if not math.isnan(row.sqnr_db)]:
        least = min(noisy, key=lambda row: row.sqnr_db)
        cells[2] = f"{statistics.median(row.sqnr_db for row in noisy):.1f}"
        cells[3] = f"{least.sqnr_db:.1f} {least.layer}"
    largest = f"{max(row.amax for row in rows):.3g}"
    return rows[0].module, rows[0].format, TENSORS[rows[0].tensor], *cells, largest


def _gradient_summary(now: Sequence[ReportRow]) -> Iterator[str]:
    rows = [row for row in now if row.tensor == GRADIENT and row.elements]
    if not rows:
        return
    total = sum(row.elements for row in rows)
    zeros = sum(row.zeros * row.elements for row in rows)
    worst = max(rows, key=lambda row: row.zeros)
    yield (
        f"weight gradients exactly zero: {zeros / total:.3%} of {total:,} elements; "
        f"worst {worst.zeros:.3%}, {worst.layer} {worst.module}{_worst_expert_text(worst)}"
    )


def _worst_expert_text(row: ReportRow) -> str:
    return "" if row.worst_expert < 0 else f" (expert {row.worst_expert}: {row.worst:.2%})"
