"""Minitron on a hybrid model, on the CPU: train a small teacher, prune it with nvidia-modelopt, distill it.

    pip install nvidia-modelopt==0.47.0
    python examples/compress_minitron.py                          # under two minutes on 2 cores
    python examples/compress_minitron.py --model super --seeds 3 --teacher-steps 400 --steps 200

There is one teacher, and for every seed three students with the same number of steps and the same batches:

    distilled     pruned, then trained on KL(teacher || student) of the logits
    trained       pruned, then trained on the text
    from scratch  same sizes, random weights, trained on the text

The text is Python's own sources. A few hundred steps show that the method works, but not its effect at scale.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

import megatron_nemotron3 as n3
from megatron_nemotron3 import compression
from megatron_nemotron3.models import Nemotron3Config, count, get, tiny
from megatron_nemotron3.train.data import prepare

#: Share of every dimension that is kept; dimensions that a model lacks are skipped.
KEPT = {
    "mamba_num_heads": 1 / 2,
    "num_attention_heads": 1 / 2,
    "hidden_size": 3 / 4,
    "ffn_hidden_size": 3 / 4,
    "num_moe_experts": 3 / 4,
    "moe_ffn_hidden_size": 2 / 3,
    "moe_shared_expert_intermediate_size": 2 / 3,
}
STUDENTS = ("distilled", "trained", "from scratch")
BATCH = 4  # sequences
CALIBRATION = 16  # batches for measuring importance
VALIDATION = 16  # batches

Step = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Text:
    """Token windows of a Megatron data set; the last 5 % are for validation."""

    def __init__(self, folder: Path, config: Nemotron3Config) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(prepare(None, folder, vocab_size=config.vocab_size).prefix)
        tokens = np.concatenate([dataset[i] for i in range(len(dataset))]).astype(np.int64)
        border = len(tokens) * 19 // 20
        self.parts = {"train": tokens[:border], "validation": tokens[border:]}
        self.window = config.seq_length + 1

    def batches(self, part: str, number: int, seed: int) -> list[torch.Tensor]:
        """Batches [b, s + 1] from random positions."""
        tokens, drawn = self.parts[part], np.random.default_rng(seed)
        starts = drawn.integers(0, len(tokens) - self.window, (number, BATCH))
        return [torch.from_numpy(np.stack([tokens[a : a + self.window] for a in row])) for row in starts]


def token_losses(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [b, s] of every next token in nats."""
    positions = torch.arange(batch.shape[1] - 1).expand(batch.shape[0], -1)
    losses: torch.Tensor = model(batch[:, :-1], positions, None, labels=batch[:, 1:].contiguous())
    return losses


def on_text(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the text."""
    return token_losses(model, batch).mean()


def on_teacher(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Distillation loss against the teacher's logits."""
    return compression.distillation_loss(model, token_losses(model, batch))


def train(model: torch.nn.Module, batches: list[torch.Tensor], lr: float, loss: Step) -> None:
    """Train with AdamW: 10 % warmup, cosine decay to a tenth, gradients clipped at 1."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = len(batches)

    def factor(step: int) -> float:
        return min((step + 1) / (0.1 * steps), 0.55 + 0.45 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    """Mean validation loss in nats per token."""
    model.eval()
    return statistics.mean(token_losses(model, batch).mean().item() for batch in batches)


def build(config: Nemotron3Config, seed: int) -> torch.nn.Module:
    """Build a model with random weights."""
    torch.manual_seed(seed)
    return n3.build_model(config, precision="fp32", backend="torch")


def main() -> int:
    """Run the study and print the table."""
    parser = argparse.ArgumentParser(description="Prune and distill a tiny hybrid through nvidia-modelopt.")
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
    if (problem := compression.modelopt_problem()) is not None:
        print(f"compress_minitron: {problem}", file=sys.stderr)
        return 2
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
    best = evaluate(teacher, validation)  # distillation disables the teacher's own loss
    weights = {name: t.clone() for name, t in teacher.state_dict().items() if t is not None}

    def calibrate(model: torch.nn.Module) -> None:
        for batch in text.batches("train", CALIBRATION, seed=2**32 - 1):
            token_losses(model, batch)

    old = {name: compression.size(config, name) for name in KEPT}
    sizes = {name: round(KEPT[name] * n) for name, n in old.items() if n}
    if options.layers:
        sizes["num_layers"] = options.layers
    cut = build(config, seed=0)
    compression.load(cut, weights)
    pruned, cut_weights = compression.prune(cut, config, sizes, calibrate)

    losses: dict[str, list[float]] = {name: [] for name in ("pruned", *STUDENTS)}
    for seed in range(1, options.seeds + 1):
        batches = text.batches("train", options.steps, seed)
        for name in losses:
            student = build(pruned, seed)
            if name != "from scratch":
                compression.load(student, cut_weights)
            if name == "distilled":
                compression.distillation_model(student, teacher)
                distilled = student
            if name in STUDENTS:
                lr = options.lr if name == "from scratch" else options.student_lr
                train(student, batches, lr, on_teacher if name == "distilled" else on_text)
            losses[name].append(evaluate(student, validation))
    if options.save is not None:
        compression.save(distilled, pruned, options.save)

    changes = ", ".join(f"{name} {compression.size(config, name)} -> {new}" for name, new in sizes.items())
    print(f"\n{config.name}: {changes}\npattern {config.pattern} -> {pruned.pattern}")
    print(f"parameters {count(config).stored:,} -> {count(pruned).stored:,}; {options.steps} steps each\n")
    print("| model | validation loss, nats | minus trained |\n|-|-|-|")
    print(f"| teacher, {options.teacher_steps} steps | {best:.3f} | |")
    for name, values in losses.items():
        difference = [a - b for a, b in zip(values, losses["trained"], strict=True)]
        print(f"| {name} | {spread(values)} | {spread(difference, '+') if name != 'trained' else ''} |")
    print(f"\n{time.monotonic() - started:.0f} s")


def spread(values: list[float], sign: str = "") -> str:
    """Mean, and the standard error of the mean if there are several values."""
    mean = f"{statistics.mean(values):{sign}.3f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


if __name__ == "__main__":
    sys.exit(main())
