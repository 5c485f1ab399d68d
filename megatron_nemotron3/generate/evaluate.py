"""How well a model and each of its MTP depths predict a text, and what that is worth for drafting.

    loss        of the next token, and at MTP depth k of the token k further on: -log p, the mean in nats
    acceptance  tokens of a verification when k tokens are drafted (`Speculation.acceptance_length`)

The loss is Megatron's: windows of `seq_length` tokens that follow each other without regard to documents,
every position with a known label counted once, the softmax over the padded vocabulary. Depth k has no label
at the last k positions of a window (Megatron's `process_mtp_loss` masks them too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_nemotron3.generate.engine import CHUNK, Engine
from megatron_nemotron3.generate.speculative import Speculation, speculate

#: Rows of logits that exist at once.
ROWS = 1024


@dataclass(frozen=True)
class Losses:
    """Nats per token.

    Attributes:
        next_token: of the model.
        depths: of MTP depth 1, 2, …
        tokens: labels of the next token; depth k has k fewer in each window.
    """

    next_token: float
    depths: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class Acceptance:
    """Drafting a certain number of tokens, greedily."""

    speculation: Speculation
    tokens_per_second: float


def windows(ids: Sequence[int], seq_length: int, tokens: int | None = None) -> Tensor:
    """Cut a text into windows that overlap by the one token that ends one and begins the next.

    Args:
        ids: the text; its end that fills no window is left out, but of a text shorter than one.
        seq_length: labels of a window.
        tokens: labels at most, but at least one window; they are spread over the text.

    Returns:
        [windows, seq_length + 1].

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} token(s): a loss needs at least 2")
    s = min(seq_length, len(ids) - 1)
    found = torch.tensor(ids).unfold(0, s + 1, s)
    count = len(found) if tokens is None else max(1, min(len(found), tokens // s))
    return found[[i * len(found) // count for i in range(count)]]


@torch.inference_mode()
def losses(engine: Engine, text: Tensor, depths: int, chunk: int = CHUNK) -> Losses:
    """Mean losses over windows of text.

    Args:
        text: [windows, s + 1] ids, of `windows`.
        depths: MTP depths, 0 or more; deeper ones than in training go on with the repeated block.
        chunk: positions of one pass.

    Raises:
        ValueError: s <= depths, ids outside the vocabulary, s beyond the context, or MTP the model lacks.
    """
    s = text.shape[1] - 1
    if s <= depths:
        raise ValueError(f"windows of {s} tokens have no label at MTP depth {depths}: use longer ones")
    engine.check([[int(text.min()), int(text.max())]], more=s - 2)
    sums = [0.0] * (depths + 1)
    chunk = min(chunk, s)
    for rows in text.to(engine.device).split(max(1, ROWS // chunk)):
        found = _hidden_and_sums(engine, rows, depths, chunk)
        sums = [a + b for a, b in zip(sums, found)]
    means = [total / (len(text) * (s - depth)) for depth, total in enumerate(sums)]
    return Losses(means[0], tuple(means[1:]), len(text) * s)


def _hidden_and_sums(engine: Engine, rows: Tensor, depths: int, chunk: int) -> list[float]:
    """Summed losses of the model and of each depth over rows [b, s + 1]."""
    b, s = rows.shape[0], rows.shape[1] - 1
    state, sums, parts = engine.new_state(b, capacity=s), [0.0], []
    for at in range(0, s, chunk):
        end = min(at + chunk, s)
        out = engine.forward(rows[:, at:end], state)
        assert out.logits is not None
        sums[0] += _sum(out.logits, rows[:, at + 1 : end + 1])
        parts.append(out.hidden)
    mtp = engine.new_mtp_state(b, depths, capacity=s) if depths else None
    for depth in range(1, depths + 1):
        assert mtp is not None
        hidden, parts = torch.cat(parts, 1), []
        sums.append(0.0)
        for at in range(0, s - depth, chunk):
            end = min(at + chunk, s - depth)
            out = engine.mtp_forward(depth, hidden[:, at:end], rows[:, at + depth : end + depth], mtp)
            assert out.logits is not None
            sums[depth] += _sum(out.logits, rows[:, at + depth + 1 : end + depth + 1])
            parts.append(out.hidden)
    return sums


def _sum(logits: Tensor, labels: Tensor) -> float:
    found = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return float(found.double().sum())


def acceptance(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, drafts: Sequence[int]
) -> list[Acceptance]:
    """Continue prompts greedily, once with each number of drafts; nothing ends a text early.

    Args:
        drafts: 0 is plain decoding.

    Raises:
        ValueError: as `speculate`.
    """
    speculate(engine, prompts, 2, draft=max(drafts))  # whatever is slow the first time only
    result = []
    for draft in drafts:
        found = speculate(engine, prompts, new_tokens, draft=draft)
        result.append(Acceptance(found.speculation, found.tokens_per_second))
    return result
