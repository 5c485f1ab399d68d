"""Minitron on a hybrid model, on the CPU: train a small teacher, prune it, distill it.

    python examples/compress_minitron.py                          # under two minutes on 2 cores
    python examples/compress_minitron.py --model super --seeds 5 --teacher-steps 400 --steps 200

There is one teacher, and for every seed three students with the same number of steps and the same batches:

    distilled     pruned, then trained on KL(teacher || student) of the logits
    trained       pruned, then trained on the text
    from scratch  same sizes, random weights, trained on the text

The text is Python's own sources. A few hundred steps show that the method works, but not its effect at scale.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this checkout, if the package is not installed
if not (HERE / "tiny_runs.py").exists():
    sys.exit(f"{__file__}: tiny_runs.py is not beside it: copy the whole folder examples/")

from tiny_runs import VALIDATION, Text, build, evaluate, on_teacher, on_text, token_losses, train

import megatron_nemotron3 as n3
from megatron_nemotron3.common import interval, paired
from megatron_nemotron3.models import count, get, tiny
from megatron_nemotron3.post_training import compress

#: Share of every dimension that is kept; dimensions that a model lacks are skipped.
KEPT = {
    "mamba_num_heads": 1 / 2,
    "num_attention_heads": 1 / 2,
    "hidden_size": 3 / 4,
    "dense_ffn_hidden_size": 3 / 4,
    "num_moe_experts": 3 / 4,
    "moe_ffn_hidden_size": 2 / 3,
    "moe_shared_expert_intermediate_size": 2 / 3,
}
STUDENTS = ("distilled", "trained", "from scratch")
CALIBRATION = 16  # batches for measuring importance


def main() -> int:
    """Run the study and print the table."""
    parser = argparse.ArgumentParser(description="Prune and distill a tiny hybrid.")
    parser.add_argument("--model", default="nano-4b", help="catalog name; its tiny form is the teacher")
    parser.add_argument("--teacher-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30, help="steps of every student (default: 30)")
    parser.add_argument("--layers", type=int, help="decoder layers to keep; default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--lr", type=float, default=4e-3, help="learning rate of the teacher and the student from scratch"
    )
    parser.add_argument("--student-lr", type=float, default=2e-3, help="learning rate of the pruned students")
    parser.add_argument("--output", type=Path, default=Path("runs/compress"))
    parser.add_argument("--save", type=Path, metavar="DIR", help="checkpoint of the last distilled student")
    options = parser.parse_args()
    with n3.cpu_mode():
        study(options)
    return 0


def study(options: argparse.Namespace) -> None:
    """Train the teacher, prune it, train the students, and print the results."""
    started = time.monotonic()
    config = tiny(get(options.model)).but(mtp_pattern=None, mtp_num_layers=0)
    text = Text(options.output / "data", config)
    validation = text.batches("validation", VALIDATION, seed=0)
    teacher = build(config, seed=0)
    train(teacher, text.batches("train", options.teacher_steps, seed=0), options.lr, on_text)
    best = evaluate(teacher, validation)  # the teacher stays in evaluation mode
    calibration = text.batches("train", CALIBRATION, seed=2**32 - 1)
    scores = compress.measure(
        teacher, config, lambda: [token_losses(teacher, batch) for batch in calibration]
    )
    sizes = {name: round(share * n) for name, share in KEPT.items() if (n := getattr(config, name))}
    if options.layers:
        sizes["num_layers"] = options.layers
    pruned, weights = compress.prune(teacher, scores, sizes)

    losses: dict[str, list[float]] = {name: [] for name in ("pruned", *STUDENTS)}
    for seed in range(1, options.seeds + 1):
        batches = text.batches("train", options.steps, seed)
        for name in losses:
            student = build(pruned, seed)
            if name != "from scratch":
                compress.load(student, weights)
            if name in STUDENTS:
                lr = options.lr if name == "from scratch" else options.student_lr
                train(student, batches, lr, on_teacher(teacher) if name == "distilled" else on_text)
            losses[name].append(evaluate(student, validation))
            if name == "distilled":
                distilled = student
    if options.save is not None:
        compress.save(distilled, pruned, options.save)

    changes = ", ".join(f"{name} {getattr(config, name)} -> {new}" for name, new in sizes.items())
    print(f"\n{config.name}: {changes}\npattern {config.pattern} -> {pruned.pattern}")
    print(f"parameters {count(config).stored:,} -> {count(pruned).stored:,}; {options.steps} steps each\n")
    print("| model | validation loss, nats | minus trained |\n|-|-|-|")
    print(f"| teacher, {options.teacher_steps} steps | {best:.3f} | |")
    for name, values in losses.items():
        difference = f"{paired(values, losses['trained']):+.3f}" if name != "trained" else ""
        print(f"| {name} | {interval(values):.3f} | {difference} |")
    print("\n±: 95 % interval by Student's t, over seeds of students; paired differences")
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
