"""What studies on tiny models share: batches of real text, a training loop, losses, and models to train."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

import megatron_nemotron3 as n3
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.post_training.distill import divergence
from megatron_nemotron3.train.data import prepare

BATCH = 4  # sequences
VALIDATION = 16  # batches

#: (model, batch [b, s + 1]) -> what a step minimizes.
Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Text:
    """Token windows of a Megatron data set; the last 5 % are for validation."""

    def __init__(self, folder: Path, config: Nemotron3Config) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        prepared = prepare(None, folder, vocab_size=config.vocab_size)
        self.tokenizer = Path(str(prepared.tokenizer.tokenizer_model))
        dataset = IndexedDataset(prepared.prefix)
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


def logits(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, v] of every next token."""
    positions = torch.arange(batch.shape[1] - 1).expand(batch.shape[0], -1)
    found: torch.Tensor = model(batch[:, :-1], positions, None)
    return found


def on_teacher(teacher: torch.nn.Module, share: float = 1.0) -> Loss:
    """KL(teacher || student) of the logits; the rest of `share` is the cross-entropy of the text."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = logits(teacher, batch)
        found = logits(model, batch)
        distance = divergence(found, wanted).mean()
        if share == 1:
            return distance
        text = torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), batch[:, 1:].flatten())
        return share * distance + (1 - share) * text

    return loss


def train(model: torch.nn.Module, batches: list[torch.Tensor], lr: float, loss: Loss) -> None:
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


def build(config: Nemotron3Config, seed: int, *options: str) -> torch.nn.Module:
    """Build a model with random weights; `options` are Megatron's."""
    torch.manual_seed(seed)
    return n3.build_model(config, precision="fp32", backend="torch", extra=options)


def kept(
    options: argparse.Namespace, variants: Iterable[str], loss_of: Callable[[str, int], float]
) -> dict[str, list[float]]:
    """Losses of each variant, of seeds 1 to options.seeds; what results.jsonl has is not computed again."""
    file = options.output / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {tuple(key): loss for *key, loss in lines}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for seed in range(1, options.seeds + 1):
        for name, losses in found.items():
            key = (name, seed, options.steps)
            if key not in known:
                known[key] = loss_of(name, seed)
                with file.open("a") as out:
                    out.write(json.dumps([*key, known[key]]) + "\n")
            losses.append(known[key])
    return found
