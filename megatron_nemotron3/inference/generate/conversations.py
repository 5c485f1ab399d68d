"""Held-out loss of conversations: of the assistant's tokens only, each conversation by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from megatron_nemotron3.inference.generate.engine import CHUNK, Engine
from megatron_nemotron3.train.data.conversations import Encoded


@dataclass(frozen=True)
class ConversationLosses:
    """Loss of the assistant's tokens in nats.

    Attributes:
        per_token: mean over all tokens.
        per_conversation: mean over conversations of each one's mean.
        tokens: labels.
        conversations: those with at least one label.
    """

    per_token: float
    per_conversation: float
    tokens: int
    conversations: int


@torch.inference_mode()
def conversation_losses(
    engine: Engine, encoded: Sequence[Encoded], report: Callable[[int], None] = lambda tokens: None
) -> ConversationLosses:
    """Measure the loss of each conversation alone, and average."""
    sums: list[tuple[float, int]] = []
    for one in encoded:
        labels_at = [i for i, mine in enumerate(one.trained[1:]) if mine]
        if not labels_at:
            report(len(one.ids))
            continue
        engine.check_prompts([one.ids[:-1]], more=0)
        ids = torch.tensor([one.ids], device=engine.device)
        state, parts = engine.new_state(1, capacity=ids.shape[1] - 1), []
        for at in range(0, ids.shape[1] - 1, CHUNK):
            end = min(at + CHUNK, ids.shape[1] - 1)
            logits = engine.forward(ids[:, at:end], state).logits[0].float()
            parts.append(cross_entropy(logits, ids[0, at + 1 : end + 1], reduction="none"))
        losses = torch.cat(parts)[torch.tensor(labels_at, device=engine.device)].double()
        sums.append((float(losses.sum()), len(labels_at)))
        report(len(one.ids))
    if not sums:
        raise ValueError(f"none of {len(encoded)} conversations has a token of the assistant")
    tokens = sum(n for _, n in sums)
    per_token = sum(total for total, _ in sums) / tokens
    return ConversationLosses(per_token, sum(total / n for total, n in sums) / len(sums), tokens, len(sums))
