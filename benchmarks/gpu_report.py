"""Tables of the results of gpu.py, written into docs/measurements.md.

    python benchmarks/gpu_report.py build/gpu/results.jsonl            # replaces what is between the markers
    python benchmarks/gpu_report.py build/gpu/results.jsonl --print    # to standard output
    python benchmarks/gpu_report.py build/gpu/results.jsonl --print --operations   # and the profiles

Results of a rehearsal (--small, or a CPU) are only printed. Sides are compared by sketches (gpu_weights.py),
the reference being transformers, or else the first side there is. A side that differs by more than two BF16
implementations may is marked "differs", and its speed means nothing. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, parser
from gpu import SIDES, WIDTHS
from gpu_compare import agrees, differences
from gpu_results import Record, Results

from megatron_nemotron3.common.files import write_text
from megatron_nemotron3.launch.plan.hardware import GPUS

PAGE = ROOT / "docs" / "measurements.md"
BEGIN, END = "<!-- results of gpu.py: begin -->", "<!-- results of gpu.py: end -->"
GIB, MIB = 2**30, 2**20

Lines = list[str]


def table(header: str, rows: Iterable[Sequence[Any]]) -> Lines:
    """A Markdown table, or nothing without rows. The columns of `header` are separated by `|`."""
    body = ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    names = header.split("|")
    return ["", f"| {' | '.join(names)} |", "|" + "-|" * len(names), *body] if body else []


def report(results: Results, operations: bool = False) -> Lines:
    """Every table for which there are results."""
    found: Lines = [*heading(results)]
    for part in (stages, tests, doctor, steps, nvfp4, generation, long_text, boundary, plan):
        found += part(results)
    return found + (profiles(results) if operations else [])


def rehearsal(results: Results) -> bool:
    """Whether the figures are no measurements of a GPU."""
    return any(run["small"] or run["device"] == "CPU" for run in results.runs)


def heading(results: Results) -> Lines:
    """Device, versions, dates and commands."""
    runs = results.runs
    last = runs[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    dates = sorted({line["date"][:10] for line in results.lines})
    commits = ", ".join(dict.fromkeys(run.get("commit") or "unknown" for run in runs))
    rates = next((row for _, row in results.rows("versions", "rates")), None)
    said = "A rehearsal with tiny models: no figure here is a measurement. " if rehearsal(results) else ""
    lines = [
        f"{said}{last['device']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {commits}."
    ]
    lines += [f"{versions}."]
    commands = dict.fromkeys(f"`{run['command']}`" for run in runs)
    lines += [f"Commands: {', '.join(commands)}."]
    if rates:
        lines += [
            f"The device multiplies BF16 matrices at {rates['matmul_tflops']:,.3g} TFLOP/s and copies "
            f"{rates['copy_gbytes']:,.0f} GB/s (bytes read and written)."
        ]
    return lines


def stages(results: Results) -> Lines:
    """What became of each stage."""
    found = results.stages().values()
    rows = [[s["stage"], s["status"], f"{s['seconds']:.0f}", s["error"][:160]] for s in found]
    return table("stage|result|s|error", rows)


def tests(results: Results) -> Lines:
    """Numbers of the tests, and those that failed."""
    counts = [row for _, row in results.rows("tests", "tests")]
    if not counts:
        return []
    last = counts[-1]
    told = ", ".join(f"{n} {name}" for name, n in last.items() if name not in ("kind", "ended"))
    lines = ["", f"`pytest -m gpu`: {told or 'no test'}{'' if last['ended'] else ', then it was stopped'}."]
    lines += [f"- {row['test']}: {row['why'][:200]}" for _, row in results.rows("tests", "failure")]
    return lines


def doctor(results: Results) -> Lines:
    """What the doctor found wrong."""
    bad = [row for _, row in results.rows("versions", "doctor") if row["level"] in ("warning", "error")]
    return (
        ["", *(f"- doctor, {row['level']}: {row['subject']}: {row['message']}" for row in bad)] if bad else []
    )


# --- training steps -----------------------------------------------------------------------------------


def of_side(results: Results, width: str, side: str) -> dict[str, Record]:
    """Kind -> row of a stage."""
    name = f"step.{width}.{side}"
    return {row["kind"]: row for stage, row in results.rows(name) if stage == name}


def peak_of(device: str) -> float | None:
    """TFLOP/s of dense BF16 products by the data sheet."""
    return next((gpu.bf16 / 1e12 for name, gpu in GPUS.items() if name in device.lower().split()), None)


def steps(results: Results) -> Lines:
    """Sides of a training step, one table for each width."""
    lines: Lines = []
    rates = next((row for _, row in results.rows("versions", "rates")), None)
    peak = peak_of(results.runs[-1]["device"])
    for width in WIDTHS:
        sides = {side: of_side(results, width, side) for side in SIDES}
        sides = {side: rows for side, rows in sides.items() if "model" in rows}
        if not sides:
            continue
        model = next(iter(sides.values()))["model"]
        reference = next((s for s in ("hf", *sides) if "parity" in sides.get(s, {})), None)
        lines += ["", f"### A training step of {width}'s width", "", described(model)]
        if reference:
            lines[-1] += f" Differences are from {SIDES[reference]}."
        rows = [step_row(side, sides, reference, peak, rates) for side in sides]
        header = "side|tok/s|ms|MFU %|of measured matmul %|peak GiB|activations GiB|waits|loss"
        lines += table(header + "|logits|gradients: median, worst|verdict|tok/s of hf|of te", rows)
        lines += [
            "",
            *(f"- {SIDES[s]}: {r['settings']['text']}" for s, r in sides.items() if "settings" in r),
        ]
    return lines


def described(model: Record) -> str:
    """The model of a step."""
    experts = f"{model['experts']} experts top-{model['topk']}"
    if model["experts"] != model["published_experts"]:
        experts += f" (published: {model['published_experts']}; more do not fit)"
    return (
        f"{model['title']}: layers {model['pattern']}, {experts}, {model['parameters'] / 1e9:.3g}B "
        f"parameters, {model['tokens']:,} tokens, {model['flops_per_token'] / 1e9:,.3g} GFLOP "
        "per token; BF16, forward and backward, no optimizer."
    )


def step_row(
    side: str, sides: dict[str, dict[str, Record]], reference: str | None, peak: float | None, rates: Any
) -> list[str]:
    """One side; what it did not reach is "-"."""
    rows = sides[side]
    cells = [SIDES[side], *["-"] * 13]
    if "speed" in rows:
        speed, seconds = rows["speed"], statistics.median(rows["speed"]["seconds"])
        tflops = rows["model"]["flops_per_token"] * speed["tokens"] / seconds / 1e12
        cells[1:9] = [
            f"{speed['tokens'] / seconds:,.0f}",
            f"{seconds * 1e3:,.1f}",
            f"{100 * tflops / peak:.1f}" if peak else "-",
            f"{100 * tflops / rates['matmul_tflops']:.1f}" if peak and rates else "-",
            f"{speed['peak'] / GIB:.3g}",
            f"{speed['held'] / GIB:.3g}",
            str(speed["waits"]),
            f"{speed['loss']:.4f}",
        ]
        for place, other in ((12, "hf"), (13, "te")):
            if "speed" in sides.get(other, {}):
                cells[place] = f"{statistics.median(sides[other]['speed']['seconds']) / seconds:.2f}"
    if "parity" in rows and reference:
        if side == reference:
            cells[11] = "reference"
        else:
            logits, median, worst, name = differences(rows["parity"], sides[reference]["parity"])
            good = agrees(logits, median, worst)
            cells[9:12] = [
                f"{logits:.1e}",
                f"{median:.1e}, {worst:.1e}" + ("" if good else f" ({name})"),
                "agrees" if good else "**differs**",
            ]
    return cells


def profiles(results: Results) -> Lines:
    """The operations that take most of the time."""
    lines: Lines = []
    for stage, row in results.rows("step.", "profile"):
        lines += ["", f"### {stage}", *table("operation|calls|ms", row["operations"])]
    return lines


# --- everything else ----------------------------------------------------------------------------------


def nvfp4(results: Results) -> Lines:
    """A step with emulated NVFP4, and single linears."""
    sides = [row for _, row in results.rows("nvfp4", "step")]
    model = next((row for _, row in results.rows("nvfp4", "model")), None)
    if model is None:
        return []
    text = f"Layers {model['pattern']}, {model['experts']} experts, {model['tokens']:,} tokens, BF16."
    lines = ["", "### NVFP4 emulation", "", text]
    lines += table(
        "quantizer|ms|ratio|peak GiB|waits",
        [
            [
                r["side"],
                f"{r['seconds'] * 1e3:,.1f}",
                f"{r['ratio']:.2f}",
                f"{r['peak'] / GIB:.2f}",
                r["waits"],
            ]
            for r in sides
        ],
    )
    linears = [row for _, row in results.rows("nvfp4", "linear")]
    columns = "|".join(linears[0]["milliseconds"]) if linears else ""
    return lines + table(
        f"linear, ms|quantizer|{columns}",
        [[r["linear"], r["quantizer"], *r["milliseconds"].values()] for r in linears],
    )


def generation(results: Results) -> Lines:
    """Decoding of one sequence."""
    lines: Lines = []
    for stage, kind in (("generate.plain", "decode"), ("generate.drafts", "drafts")):
        model = next((row for _, row in results.rows(stage, "model")), None)
        rows = [row for _, row in results.rows(stage, kind)]
        if model is None:
            continue
        memory = f", {model['memory'] / GIB:.3g} GiB" if model["memory"] else ""
        lines += [
            "",
            f"### Generation, {'plain' if kind == 'decode' else 'drafts'}",
            "",
            f"{model['title']}: layers {model['pattern']}, {model['parameters'] / 1e9:.3g}B parameters, "
            f"{model['experts']} experts, {model['dtype']}{memory}; batch 1, greedy, random weights.",
        ]
        if kind == "decode":
            header = "context|tokens/s|prefill s"
            cells = [
                [
                    f"{r['context']:,}",
                    f"{r['tokens_per_second']:.1f}",
                    f"{r['prefill_seconds']:.2f}",
                ]
                for r in rows
            ]
        else:
            header = "drafts|ms a pass|acceptance length|tokens/s"
            header += "|pays from acceptance length|equal tokens"
            cells = [
                [
                    r["drafts"],
                    f"{r['seconds_per_pass'] * 1e3:.2f}",
                    f"{r['acceptance_length']:.2f}",
                    f"{r['tokens_per_second']:.1f}",
                    f"{r['break_even']:.2f}" if r["drafts"] else "-",
                    f"{r['equal']} of {r['new']}",
                ]
                for r in rows
            ]
            lines[-1] += " The weights make MTP agree with the model: acceptance is not a measurement."
        lines += table(header, cells)
    return lines


def long_text(results: Results) -> Lines:
    """Prefill of a long text."""
    model = next((row for _, row in results.rows("prefill", "model")), None)
    if model is None:
        return []
    lines = ["", "### Prefill of a long text", "", f"{model['title']}: layers {model['pattern']}."]
    for _, row in results.rows("prefill", "one pass"):
        share = row["difference"] / row["norm"]
        lines[-1] += (
            f" Logits after {row['tokens']:,} tokens in chunks are {share:.1e} from one pass (norms)."
        )
    return lines + table(
        "tokens|s|states MiB|KV cache MiB|other memory MiB",
        [
            [
                f"{r['tokens']:,}",
                f"{r['seconds']:.1f}",
                f"{r['states'] / MIB:.1f}",
                f"{r['kv_cache'] / MIB:,.1f}",
                "-" if r["other"] is None else f"{r['other'] / MIB:,.1f}",
            ]
            for _, r in results.rows("prefill", "prefill")
        ],
    )


def boundary(results: Results) -> Lines:
    """What one device does for rows between modules."""
    packs = [row for _, row in results.rows("boundary", "pack")]
    lines = ["", "### Rows between modules, on one device"] if packs else []
    lines += table(
        "pieces|MiB|pack GB/s|unpack GB/s",
        [
            [r["pieces"], f"{r['bytes'] / MIB:.1f}", f"{r['pack'] / 1e9:,.0f}", f"{r['unpack'] / 1e9:,.0f}"]
            for r in packs
        ],
    )
    return lines + table(
        "length|CP x TP|slices us|upstream us|slices MiB|upstream MiB",
        [
            [
                f"{r['length']:,}",
                r["layout"],
                *(f"{s * 1e6:,.0f}" for s in r["seconds"]),
                *(f"{b / MIB:,.1f}" for b in r["peak"]),
            ]
            for _, r in results.rows("boundary", "align")
        ],
    )


def plan(results: Results) -> Lines:
    """The plan beside what was measured."""
    rows = []
    for _, r in results.rows("plan", "plan"):
        planned = r["planned_seconds"]
        rows.append(
            [
                f"{r['width']}, {SIDES[r['side']]}",
                f"{r['bytes'] / GIB:.3g}",
                f"{r['planned_bytes'] / GIB:.3g}",
                f"{r['planned_bytes'] / r['bytes'] - 1:+.0%}" if r["bytes"] else "-",
                f"{r['seconds'] * 1e3:,.1f}",
                f"{planned * 1e3:,.1f}" if planned else "-",
                f"{planned / r['seconds'] - 1:+.0%}" if planned else "-",
            ]
        )
    header = "step|activations GiB|planned|error|ms|planned|error"
    return ["", "### The plan beside these steps", *table(header, rows)] if rows else []


def put(page: str, lines: Lines) -> str:
    """The page with the tables between its markers.

    Raises:
        ValueError: it does not have each marker once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one line {BEGIN} and one line {END} after it")
    return (
        page[: page.index(BEGIN) + len(BEGIN)] + "\n\n" + "\n".join(lines) + "\n\n" + page[page.index(END) :]
    )


def main(argv: Sequence[str] | None = None) -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("results", type=Path)
    options.add_argument("--page", type=Path, default=PAGE, help="default: docs/measurements.md")
    options.add_argument("--print", action="store_true", help="print the tables and write nothing")
    options.add_argument("--operations", action="store_true", help="also the operations of each step")
    args = options.parse_args(argv)
    try:
        if not args.results.exists():
            raise ValueError(f"{args.results} does not exist: make gpu writes it")
        results = Results(args.results)
        if not results.lines:
            raise ValueError(f"{args.results} is empty")
        lines = report(results, args.operations)
        if args.print or rehearsal(results):
            print("\n".join(lines))
            if not args.print:
                print(f"gpu_report.py: a rehearsal: {args.page} is left as it is", file=sys.stderr)
            return 0
        write_text(args.page, put(args.page.read_text(encoding="utf-8"), lines))
    except (ValueError, OSError) as error:
        print(f"gpu_report.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.page}: {len(results.stages())} stages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
