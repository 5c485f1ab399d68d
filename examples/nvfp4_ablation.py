"""NVFP4 at CPU scale: tiny Super with and without the recipe's ingredients, paired seeds, real text.

    python examples/nvfp4_ablation.py [--steps 200] [--seeds 5] [--only "recipe" …] [--output DIR]

All runs of a seed start from the same weights and see the same text in the same order with the same schedule.
They differ only in how the linears' products are quantized (docs/nvfp4.md), so differences are paired. What
is not quantized is FP32, which is three times as fast as BF16 on a CPU. A finished run is a line of
results.jsonl and is not computed again.

Expect differences within the noise. The example shows that the emulation works and how large the noise is,
not what NVFP4 costs or ingredients are worth at scale.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this checkout, if the package is not installed
if not (HERE / "tiny_runs.py").exists():
    sys.exit(f"{__file__}: tiny_runs.py is not beside it: copy the whole folder examples/")

from tiny_runs import VALIDATION, Text, build, evaluate, kept, on_text, train

import megatron_nemotron3 as n3
from megatron_nemotron3.common import Interval, interval
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.precision import bf16_tail, emulating, parse_emulation, write_precision_file

MODEL = tiny(get("super")).but(name="super-tiny", mtp_pattern=None, mtp_num_layers=0, seq_length=128)
RATE = 4e-3
BASELINE, RECIPE = "baseline", "recipe"
#: Value of NEMOTRON3_EMULATE.
VARIANTS = {
    BASELINE: "0",
    RECIPE: "nvfp4",
    "every layer": "nvfp4,every_layer=1",
    "no RHT": "nvfp4,rht=0",
    "no SR": "nvfp4,sr=0",
    "no 2D": "nvfp4,2d=0",
    "forward only": "nvfp4,dgrad=0,wgrad=0",
    "backward only": "nvfp4,fprop=0",
}


def loss_of(variant: str, seed: int, steps: int, text: Text, file: Path) -> float:
    """Validation loss (nats per token) after `steps`. `file`: Megatron's precision file of the recipe."""
    emulation = parse_emulation(VARIANTS[variant])
    words: list[str] = []
    if emulation is not None and not emulation.every_layer:
        words = ["--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "0"]
        words += [
            "--num-layers-at-end-in-bf16",
            str(bf16_tail(MODEL)),
            "--te-precision-config-file",
            str(file),
        ]
    with emulating(emulation):
        model = build(MODEL, seed, *words)
    train(model, text.batches("train", steps, seed), RATE, on_text)
    return evaluate(model, text.batches("validation", VALIDATION, seed=0))


def gap(losses: list[float], against: list[float]) -> Interval:
    """95 % interval of the mean of the seeds' gaps in percent."""
    return interval([100 * (a / b - 1) for a, b in zip(losses, against, strict=True)])


def report(losses: dict[str, list[float]]) -> None:
    """The table, and how much of it is noise."""
    print("| variant | loss | gap to baseline, % | gap to recipe, % |\n|-|-|-|-|")
    for name, values in losses.items():
        cells = [f"{statistics.mean(values):.4f}"]
        for other in (BASELINE, RECIPE):
            shown = other in losses and name != other
            cells.append(f"{gap(values, losses[other]):+.2f}" if shown else "")
        print(f"| {name} | " + " | ".join(cells) + " |")
    base = losses[BASELINE]
    if len(base) == 1:
        print("\nOne seed: no error can be given, so no gap means anything.")
        return
    spread = 100 * statistics.stdev(base) / statistics.mean(base)
    print(f"\nBetween seeds the baseline itself varies by {spread:.2f} % (standard deviation).")
    others = {name: gap(values, base) for name, values in losses.items() if name != BASELINE}
    limit = 0.05 / max(1, len(others))
    print("± is the 95 % interval by Student's t. p of no gap to the baseline:", end=" ")
    print(", ".join(f"{name} {found.p:.3f}" for name, found in others.items()) + ".")
    clear = [name for name, found in others.items() if found.p < limit]
    print(f"Below {limit:.3f}, which is 0.05 for {len(others)} comparisons: {', '.join(clear) or 'none'}.")


def main() -> None:
    """Train all variants and print the table."""
    parser = argparse.ArgumentParser(description="NVFP4 at CPU scale, paired seeds.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="these variants and the baseline")
    parser.add_argument("--output", type=Path, default=Path("runs/nvfp4_ablation"))
    options = parser.parse_args()
    chosen = [name for name in VARIANTS if name == BASELINE or name in (options.only or VARIANTS)]

    text, file = Text(options.output / "data", MODEL), options.output / "precision.yaml"
    write_precision_file(MODEL, file)
    with n3.cpu_mode():
        losses = kept(options, chosen, lambda name, seed: loss_of(name, seed, options.steps, text, file))
    print(f"\n{options.steps} steps, seeds 1..{options.seeds}, validation loss in nats per token\n")
    report(losses)


if __name__ == "__main__":
    main()
