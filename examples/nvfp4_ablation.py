"""NVFP4 at CPU scale: tiny Super with and without the recipe's ingredients, paired seeds, real text.

    python examples/nvfp4_ablation.py [--steps 200] [--seeds 5] [--only "recipe" …] [--output DIR]

All runs of a seed start from the same weights and see the same text in the same order with the same schedule.
They differ only in how the linears' products are quantized (docs/nvfp4.md), so differences are paired. What
is not quantized is FP32, which is three times as fast as BF16 on a CPU. A finished run is read, not repeated.

Expect NVFP4 to cost less than one percent, and single ingredients to make a difference within the noise. The
example shows that the emulation works and how large the noise is, not what ingredients are worth at scale.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

from megatron_nemotron3.args import Launch, ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.paired import Interval, interval
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.settings import VARIABLE
from megatron_nemotron3.precision.table import bf16_tail
from megatron_nemotron3.train import log, training
from megatron_nemotron3.train.data import prepare
from megatron_nemotron3.train.training import Request

MODEL = tiny(get("super"))
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


def train(variant: str, seed: int, steps: int, folder: Path, prefix: str, tokenizer: str) -> float:
    """Validation loss (nats per token) after `steps`."""
    output = folder / f"{variant.replace(' ', '-')}-seed{seed}"
    os.environ[VARIABLE] = VARIANTS[variant]  # the training process inherits it
    options = ["--seed", seed, "--eval-iters", 32, "--eval-interval", steps, "--save-interval", steps]
    if variant != BASELINE:
        file = folder / "precision.yaml"
        yaml_file.write(MODEL, file)
        options += ["--first-last-layers-bf16", "--num-layers-at-start-in-bf16", 0]
        options += ["--num-layers-at-end-in-bf16", bf16_tail(MODEL), "--te-precision-config-file", file]
    status = training.train(
        Request(
            launch=Launch.of(
                MODEL,
                precision="fp32",
                backend="torch",
                schedule=training.schedule_of(MODEL, ParallelLayout(), steps=steps),
                extra=tuple(map(str, options)),
            ),
            device="cpu",
            output=output,
            data_path=(prefix,),
            tokenizer=tokenizer,
        )
    )
    if status != 0:
        raise SystemExit(status)
    curve = log.read(str(output / "train.log"))
    return curve.validation[max(curve.validation)]


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

    text = prepare(None, options.output / "data", vocab_size=MODEL.vocab_size)
    assert text.tokenizer.tokenizer_model is not None
    losses: dict[str, list[float]] = {name: [] for name in chosen}
    for seed in range(1, options.seeds + 1):
        for name in chosen:
            arguments = (options.steps, options.output, text.prefix, text.tokenizer.tokenizer_model)
            losses[name].append(train(name, seed, *arguments))
    print(f"\n{options.steps} steps, seeds 1..{options.seeds}, validation loss in nats per token\n")
    report(losses)


if __name__ == "__main__":
    main()
