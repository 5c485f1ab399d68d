"""A tiny Nano Omni learns to read words from pictures and to name spoken digits, in minutes on two cores.

    python examples/omni_learns.py                  # pictures, sounds, training, scores, plot, checkpoint
    python examples/omni_learns.py --steps 200      # sounds, but hardly a word yet

Encoders and language model start from random weights. Words are 600 of consonant, vowel, consonant, in six
fonts and several sizes; digits are spoken by espeak-ng in nine voices (without it: tunes). Scores are of
media that training did not see: 120 other words in two other fonts, and digits in three other voices. The
score of a kind of medium is the share of answers that greedy decoding gives to the letter. It stands beside
chance, beside the trained model whose media are hidden, and beside a model that was trained without encoders.
All that these can tell from is the question, and how long a sound is.

Then the initial weights take some steps in three layouts: one process, all modules on two ranks with layouts
of their own, and each module on ranks of its own. Losses and gradient norms must agree.

Written to --output: media and conversations, results.json, learns.png, checkpoints (Megatron's), and hf with
the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Ranks are forked from a server that starts with the environment alone.
sys.path[:0] = [str(HERE), str(HERE.parent)]
for needed in ("omni_media.py", "omni_rank.py", "omni_task.py"):
    if not (HERE / needed).exists():
        sys.exit(f"{__file__}: {needed} is not beside it: copy the whole folder examples/")
os.environ |= {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

import omni_media
import omni_task as task
import torch
from omni_rank import Curve, Job, said, train

from megatron_nemotron3.boundary import Layout
from megatron_nemotron3.common import picture, step_axis
from megatron_nemotron3.proof.certify import run_distributed

NAMES = {"image": "words in pictures", "audio": "spoken digits"}


def layouts(vision: str, sound: str, language: str) -> dict[str, Layout]:
    """Layouts of the modules from their texts."""
    given = {"vision": vision, "sound": sound, "language": language}
    return {name: Layout.parse(text) for name, text in given.items()}


ONE = layouts("dp=1", "dp=1", "dp=1")
#: What is compared with one process; TP of an encoder means replicas.
OTHERS = {
    "colocated": layouts("dp=2", "tp=2", "tp=2,sp"),
    "disjoint": layouts("dp=1", "dp=1,offset=1", "tp=2,offset=2,sp"),
}


def run(job: Job, output: Path, result: Path | None = None) -> Curve:
    """Train in processes of their own, from the common initial weights."""
    where = (str(output / "encoded.pt"), str(output / "initial"), None if result is None else str(result))
    limit = 120 + 10 * job.steps  # seconds
    return run_distributed(train, job.world, job, *where, timeout=limit, apart=True)[0]


def compare(steps: int, output: Path) -> dict[str, Curve]:
    """Take the same steps in all layouts, of two microbatches each.

    Every layout encodes the sounds of a microbatch together: transformers' last row of a sound whose frames
    are a multiple of 8 depends on how far the batch is padded.
    """
    given = {"one process": ONE, **OTHERS}
    return {name: run(Job(one, steps, samples=8, microbatches=2), output) for name, one in given.items()}


def differences(curve: Curve, other: Curve) -> dict[str, float]:
    """Largest relative differences of losses and of gradient norms."""

    def largest(mine: Sequence[float], theirs: Sequence[float]) -> float:
        gaps = [abs(a - b) / b for a, b in zip(mine, theirs, strict=True)]
        return max(gaps) if all(map(math.isfinite, gaps)) else math.inf

    return {"loss": largest(curve.losses, other.losses), "norm": largest(curve.norms, other.norms)}


def plot(seeing: Curve, blind: Curve, compared: Mapping[str, Curve], path: Path) -> None:
    """Losses, scores, and differences between layouts."""
    with picture(path, 1, 3, size=(13, 3.8), title="A tiny Nano Omni learns") as (_, grid):
        left, middle, right = grid[0]
        for name, curve in {"with encoders": seeing, "without": blind}.items():
            width = max(1, len(curve.losses) // 50)
            means = [
                sum(curve.losses[i : i + width]) / width
                for i in range(0, len(curve.losses) - width + 1, width)
            ]
            left.plot([width * (i + 1) for i in range(len(means))], means, label=name)
        left.set(title="Loss of answers", ylabel="nats per token")
        for kind, color in zip(NAMES, ("C0", "C1"), strict=True):
            percent = [100 * scores[kind] for scores in seeing.scores.values()]
            middle.plot(list(seeing.scores), percent, color=color, marker=".", label=NAMES[kind])
            shares = [(task.CHANCE[kind], ":")] + [(s[kind], "--") for s in blind.scores.values()]
            for share, style in shares:
                middle.axhline(100 * share, color=color, linestyle=style, linewidth=1)
        middle.plot([], [], "k--", linewidth=1, label="without encoders")
        middle.plot([], [], "k:", linewidth=1, label="chance")
        middle.set(title="Held-out answers, exactly right", ylabel="%", ylim=(-3, 103))
        for name, curve in compared.items():
            if name != "one process":
                one = compared["one process"].losses
                gaps = [abs(a - b) / b for a, b in zip(curve.losses, one, strict=True)]
                so_far = [max(1e-9, *gaps[: step + 1]) for step in range(len(gaps))]
                right.plot(range(1, len(gaps) + 1), so_far, marker=".", label=name)
        right.set(title="Loss: largest relative difference to one process so far", yscale="log")
        for axes in grid[0]:
            step_axis(axes)
            if axes.lines:
                axes.legend()


def table(seeing: Curve, blind: Curve) -> str:
    """Scores beside chance and beside the model without encoders."""
    last = seeing.scores[max(seeing.scores)]
    columns = ("held out", "right", "media hidden", "trained without encoders", "chance")
    lines = ["".join(f"{word:>26}" if i else f"{word:20}" for i, word in enumerate(columns))]
    for kind, name in NAMES.items():
        alone = [scores[kind] for scores in blind.scores.values()]
        shares = [last[kind], seeing.without_media[kind], alone[-1] if alone else math.nan, task.CHANCE[kind]]
        lines.append(f"{name:20}" + "".join(f"{share:26.1%}" for share in shares))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/omni_learns"), help="new folder")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--blind-steps", type=int, default=300, help="of the model without encoders; 0: none")
    parser.add_argument("--compared-steps", type=int, default=8, help="in each layout; 0: none")
    parser.add_argument("--pictures", type=int, nargs=2, default=[1800, 240], help="training, held out")
    parser.add_argument("--sounds", type=int, nargs=2, default=[600, 150], help="training, held out")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="between layouts, relative")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args(argv)
    if args.output.exists():
        parser.error(f"{args.output} exists: delete it or give another --output")
    output, parts = args.output, ("train", "held_out")
    began = time.monotonic()

    def told(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {what}", flush=True)

    task.write(output, *(dict(zip(parts, counts, strict=True)) for counts in (args.pictures, args.sounds)))
    speech = "espeak-ng" if omni_media.can_speak() else "tunes: espeak-ng is not installed"
    told(f"media in {output}: {sum(args.pictures)} pictures, {sum(args.sounds)} sounds ({speech})")
    processor = task.processor(output / "hf")
    torch.save({part: task.encoded(output, part, processor) for part in parts}, output / "encoded.pt")
    told("processed")
    scored = max(1, args.steps // 10)
    seeing = run(
        Job(ONE, args.steps, scored=scored, threads=args.threads), output, result=output / "checkpoints"
    )
    told(f"trained {args.steps} steps, {seeing.seconds / args.steps * 1000:.0f} ms each")
    blind = Curve()
    if args.blind_steps:
        job = Job(ONE, args.blind_steps, blind=True, scored=args.blind_steps, threads=args.threads)
        blind = run(job, output)
        told(f"without encoders: {args.blind_steps} steps; {said(blind.scores[args.blind_steps])}")
    compared: dict[str, Curve] = {}
    if args.compared_steps:
        compared = compare(args.compared_steps, output)
        told(f"{args.compared_steps} steps each: {', '.join(compared)}")
    agreement = {
        name: differences(curve, compared["one process"])
        for name, curve in compared.items()
        if name != "one process"
    }
    results = {
        "media": {"pictures": args.pictures, "sounds": args.sounds, "speech": speech},
        "chance": task.CHANCE,
        "with encoders": asdict(seeing),
        "without encoders": asdict(blind),
        "differences to one process": agreement,
        "seconds": round(time.monotonic() - began),
    }
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(seeing, blind, compared, output / "learns.png")
    for leftover in (output / "encoded.pt", output / "initial"):
        leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover)
    print("", table(seeing, blind), "", "largest relative difference to one process", sep="\n")
    for name, gaps in agreement.items():
        print(f"{name:12} loss {gaps['loss']:.1e}, gradient norm {gaps['norm']:.1e}")
    print(f"results: {output}/results.json, learns.png; model: {output}/checkpoints")
    if bad := [name for name, gaps in agreement.items() if not max(gaps.values()) <= args.tolerance]:
        print(f"not within --tolerance: {', '.join(bad)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
