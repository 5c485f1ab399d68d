"""Tables of the results of gpu.py. Needs neither torch nor a GPU.

Sides of a training step are compared by sketches (weights.py), the reference being transformers, or else the
first side there is. A side that differs by more than two BF16 implementations may is marked "differs", and its
speed means nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from common import GIB, table
from gpu import SIDES, STAGES, WIDTHS, Record, Results

from megatron_nemotron3.launch.plan.hardware import GPUS

EPS = 2.0**-7
#: Of two sides in BF16. The root mean square error of one rounding is 0.21 eps (eps / sqrt(12) where the
#: significand is 1, half of it just below 2). A layer rounds about 9 times between its input and the residual
#: stream, and squares of independent errors add: for 12 layers 0.21 eps * sqrt(9 * 12) = 2.2 eps per side,
#: 3.1 eps between two.
LOGITS = 4 * EPS
#: Gradients read the roundings of forward and add as many; a single one may be a sum with cancellation, such
#: as those of A_log and dt_bias (tests/gpu/test_model.py). Median and worst of all tensors.
GRADIENTS = (2**0.5 * 5 * EPS, 2**0.5 * 20 * EPS)


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """|difference| / |expected| of two sketches."""
    norm = math.hypot(*expected)
    return math.hypot(*(a - b for a, b in zip(found, expected, strict=True))) / norm if norm else math.inf


def differences(found: Record, expected: Record) -> tuple[float, float, float, str]:
    """Of logits, the median and the largest of the gradients, and whose it is."""
    logits = distance(found["logits"], expected["logits"])
    mine, theirs = found["gradients"], expected["gradients"]
    if missing := mine.keys() ^ theirs.keys():
        return logits, math.inf, math.inf, f"{len(missing)} gradients of one side only: {min(missing)}"
    each = {name: distance(mine[name], theirs[name]) for name in mine}
    # nan is larger than every number here
    worst = max(each, key=lambda name: math.inf if math.isnan(each[name]) else each[name])
    return logits, statistics.median(each.values()), each[worst], worst


def agrees(logits: float, median: float, worst: float) -> bool:
    """Whether two sides in BF16 may differ so; never with nan."""
    return logits <= LOGITS and median <= GRADIENTS[0] and worst <= GRADIENTS[1]


def report(results: Results) -> list[str]:
    """Every table for which there are results."""
    if not results.runs:
        return [f"{results.path} has no results: make gpu writes it"]
    found = results.stages()
    lines = [*heading(results), ""]
    lines += table(
        {"stage": name, "result": one["status"], "s": round(one["seconds"]), "said": one["said"][:160]}
        for name, one in found.items()
    )
    for width in WIDTHS:
        lines += steps(results, width)
    for stage in STAGES:
        for kind, rows in kinds(found[stage.name]["rows"] if stage.name in found else []):
            if stage.name.startswith("step.") and kind != "profile":
                continue
            lines += ["", f"{stage.title}: {kind}", "", *table(rows)]
    return lines


def kinds(rows: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Kind -> rows without it."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        yield kind, [{k: v for k, v in row.items() if k != "kind"} for row in rows if row["kind"] == kind]


def heading(results: Results) -> Iterator[str]:
    """Device, versions, dates and commands."""
    runs = results.runs
    last = runs[-1]
    if any(run["small"] or run["device"] == "CPU" for run in runs):
        yield "A rehearsal with tiny models: no figure here is a measurement."
    dates = dict.fromkeys([min(x["date"] for x in results.lines)[:10], last["date"][:10]])
    commits = dict.fromkeys(run["commit"] or "unknown" for run in runs)
    yield f"{last['device']}, {' to '.join(dates)}, commit {', '.join(commits)}."
    yield f"{', '.join(f'{name} {version}' for name, version in last['versions'].items())}."
    yield f"Commands: {', '.join(dict.fromkeys(f'`{run["command"]}`' for run in runs))}."


def steps(results: Results, width: str) -> list[str]:
    """The sides of a training step of one width."""
    sides: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        stage = results.stages().get(f"step.{width}.{side}", {"rows": ()})
        rows = {row["kind"]: row for row in stage["rows"]}
        if "model" in rows:
            sides[side] = rows
    if not sides:
        return []
    model = next(iter(sides.values()))["model"]
    lines = [
        "",
        f"{model['title']}, a training step: layers {model['pattern']}, {model['experts']} of "
        f"{model['published_experts']} experts, top-{model['topk']}, {model['parameters'] / 1e9:.3g}B "
        f"parameters, {model['tokens']:,} tokens, {model['flops_per_token'] / 1e9:,.3g} GFLOP per token; "
        "BF16, forward and backward, no optimizer.",
        "",
        *(f"- {SIDES[side]}: {rows['settings']['text']}" for side, rows in sides.items() if "settings" in rows),
        "",
    ]
    return lines + table(step_row(results, side, sides) for side in sides)


def step_row(results: Results, side: str, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One side; what it did not reach is None."""
    rows = sides[side]
    speed, parity = rows.get("speed"), rows.get("parity")
    names = "tok/s|ms|MFU %|of measured matmul %|peak GiB|activations GiB|waits|loss|of hf|of te"
    row: dict[str, Any] = {"side": SIDES[side], **dict.fromkeys(names.split("|"))}
    row |= dict.fromkeys(("logits", "gradients: median", "worst", "verdict"))
    if speed:
        took = statistics.median(speed["seconds"])
        tflops = rows["model"]["flops_per_token"] * speed["tokens"] / took / 1e12
        device = results.runs[-1]["device"].lower().split()
        peak = next((gpu.bf16 / 1e12 for name, gpu in GPUS.items() if name in device), None)
        rates = results.stages().get("rates", {"rows": ()})["rows"]
        row["tok/s"], row["ms"] = round(speed["tokens"] / took), f"{1e3 * took:,.1f}"
        row["MFU %"] = f"{100 * tflops / peak:.1f}" if peak else None
        row["of measured matmul %"] = f"{100 * tflops / rates[0]['matmul TFLOP/s']:.1f}" if rates else None
        row["peak GiB"], row["activations GiB"] = speed["peak"] / GIB, speed["held"] / GIB
        row["waits"], row["loss"] = speed["waits"], f"{speed['loss']:.4f}"
        for other in ("hf", "te"):
            if "speed" in sides.get(other, {}):
                theirs = statistics.median(sides[other]["speed"]["seconds"])
                row[f"of {other}"] = f"{theirs / took:.2f}"
    reference = next((name for name in ("hf", *sides) if "parity" in sides.get(name, {})), None)
    if parity and side == reference:
        row["verdict"] = "reference"
    elif parity and reference:
        logits, median, worst, name = differences(parity, sides[reference]["parity"])
        good = agrees(logits, median, worst)
        row |= {"logits": f"{logits:.1e}", "gradients: median": f"{median:.1e}"}
        row |= {"worst": f"{worst:.1e} ({name})", "verdict": "agrees" if good else "**differs**"}
    return row
