"""The file of a precision report: written during a run, read and summarized later. Standard library only.

`precision.csv` has a row per measured iteration, linear and tensor. Columns: docs/nvfp4.md.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = "precision.csv"
PICTURE = "precision.png"
#: Tensors of a linear in the order of reports -> how people call them.
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


class Row(NamedTuple):
    """One tensor of one linear in one iteration; of experts all of a layer together. Shares from 0 to 1."""

    iteration: int
    #: "layer_007" (1-based over all pipeline stages), "mtp_1_layer_2", "mtp_layer_2" (all depths), "mtp_1".
    layer: str
    #: Inside the layer: "mixer.in_proj".
    module: str
    #: "nvfp4" or "mxfp8".
    format: str
    #: Of `TENSORS`.
    tensor: str
    #: Whether the run computed with these values (emulated), or would have.
    used: bool
    #: Over microbatches and ranks; of a weight each rank's copy counts, of a gradient every element once.
    elements: int
    zeros: float
    flushed: float
    sqnr_db: float
    amax: float
    #: The expert that is worst in `flushed` (of a gradient: in `zeros`), and its share; -1: no experts.
    worst_expert: int = -1
    worst: float = math.nan


class ReportError(ValueError):
    """There is no report, or it is broken. The message names file, line and cure."""


def append(folder: str | Path, rows: Iterable[Row]) -> None:
    """Add rows to the file in `folder`, in one write; both are made if they are missing."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    lines = [",".join(Row._fields)] if new else []
    lines += [",".join(map(_text, row)) for row in rows]
    if not lines:
        return
    with path.open("a", encoding="ascii") as file:
        file.write("\n".join(lines) + "\n")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def read(folder: str | Path) -> list[Row]:
    """All rows of a report, by iteration. Where a resumed run repeats an iteration, the later rows count.

    A last line without its end is passed over: a run that still writes, or was killed.

    Raises:
        ReportError: no file, no rows, or a line that is none of ours.
    """
    path = Path(folder) / FILE
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        raise ReportError(f"{path} does not exist: train with --log-precision") from None
    except UnicodeDecodeError as problem:
        raise ReportError(f"{path} is no precision report: {problem}") from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines or lines[0] != ",".join(Row._fields):
        raise ReportError(f"{path}:1 is not the header {','.join(Row._fields)}: not a report of this version")
    found: dict[tuple[int, str, str, str], Row] = {}
    for number, cells in enumerate(csv.reader(lines[1:]), 2):
        try:
            row = _row(cells)
        except (ValueError, IndexError, TypeError) as problem:
            raise ReportError(f"{path}:{number} is broken ({problem}): delete the line") from None
        found[row.iteration, row.layer, row.module, row.tensor] = row
    if not found:
        raise ReportError(f"{path} holds no measurement: no linear of the run is NVFP4 or MXFP8")
    return sorted(found.values(), key=lambda row: row.iteration)


def _row(cells: Sequence[str]) -> Row:
    if len(cells) != len(Row._fields):
        raise ValueError(f"{len(cells)} cells instead of {len(Row._fields)}")
    iteration, layer, module, fmt, tensor, used, elements, *floats, expert, worst = cells
    if tensor not in TENSORS:
        raise ValueError(f"unknown tensor {tensor!r}")
    zeros, flushed, sqnr, amax = (float(cell or "nan") for cell in floats)
    place = (int(iteration), layer, module, fmt, tensor, bool(int(used)), int(elements))
    return Row(*place, zeros, flushed, sqnr, amax, int(expert), float(worst or "nan"))


def last(rows: Sequence[Row]) -> list[Row]:
    """The rows of the last measured iteration."""
    return [row for row in rows if row.iteration == rows[-1].iteration]


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of text: by kind of module and tensor the median and the worst layer at the last measurement."""
    iterations = sorted({row.iteration for row in rows})
    now = last(rows)
    what = "as computed" if now[0].used else "as NVFP4 would compute"
    yield (
        f"precision at iteration {iterations[-1]} ({len(iterations)} measured from {iterations[0]} on), "
        f"{what}: median layer, worst layer"
    )
    head = ("module", "format", "tensor", "flushed to zero", "", "SQNR, dB", "", "largest |x|")
    table: list[tuple[str, ...]] = [head]
    table += [_line(group) for group in _groups(now) if group[0].tensor != GRADIENT]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        yield "  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip()
    yield from _gradients(now)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one module, format and tensor, in order of appearance and of `TENSORS`."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.module, row.format, row.tensor), []).append(row)
    modules = list(dict.fromkeys(module for module, _, _ in found))
    order = list(TENSORS)
    return [found[key] for key in sorted(found, key=lambda k: (modules.index(k[0]), k[1], order.index(k[2])))]


def _line(rows: list[Row]) -> tuple[str, ...]:
    flushed = [row for row in rows if not math.isnan(row.flushed)]
    noisy = [row for row in rows if not math.isnan(row.sqnr_db)]
    cells = ["", "", "", ""]
    if flushed:
        worst = max(flushed, key=lambda row: row.flushed)
        cells[0] = f"{statistics.median(row.flushed for row in flushed):.2%}"
        cells[1] = f"{worst.flushed:.2%} {worst.layer}{_expert(worst)}"
    if noisy:
        least = min(noisy, key=lambda row: row.sqnr_db)
        cells[2] = f"{statistics.median(row.sqnr_db for row in noisy):.1f}"
        cells[3] = f"{least.sqnr_db:.1f} {least.layer}"
    first = rows[0]
    return (
        first.module,
        first.format,
        TENSORS[first.tensor],
        *cells,
        f"{max(row.amax for row in rows):.3g}",
    )


def _gradients(now: Sequence[Row]) -> Iterator[str]:
    rows = [row for row in now if row.tensor == GRADIENT and row.elements]
    if not rows:
        return
    total = sum(row.elements for row in rows)
    zeros = sum(row.zeros * row.elements for row in rows)
    worst = max(rows, key=lambda row: row.zeros)
    yield (
        f"weight gradients exactly zero: {zeros / total:.3%} of {total:,} elements; "
        f"worst {worst.zeros:.3%}, {worst.layer} {worst.module}{_expert(worst)}"
    )


def _expert(row: Row) -> str:
    return "" if row.worst_expert < 0 else f" (expert {row.worst_expert}: {row.worst:.2%})"


def remove(folder: str | Path) -> None:
    """Forget the report of an earlier run."""
    for name in (FILE, PICTURE):
        (Path(folder) / name).unlink(missing_ok=True)
