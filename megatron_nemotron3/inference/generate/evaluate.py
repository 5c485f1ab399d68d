"""Held-out loss of a model and each of its MTP depths, and the number of drafts that are accepted.

The loss is Megatron's: consecutive windows of `seq_length` tokens that ignore document boundaries, every
position with a known label counted once, the softmax over the padded vocabulary. Depth k has no label at the
last k positions of a window (Megatron's `process_mtp_loss` masks them, too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_nemotron3.inference.generate.engine import CHUNK, Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.prompts import Generation, GenerationOptions, generate

if TYPE_CHECKING:
    from megatron_nemotron3.train.data.conversations import Encoded

#: Rows of logits that exist at once, and those of two distributions that are compared.
LOGIT_ROWS, COMPARED_ROWS = 1024, 256


@dataclass(frozen=True)
class DepthAgreement:
    """How near one MTP depth is to the distribution that the model itself has for the same token.

    kl: KL(model || MTP), mean nats per token.
    overlap: mean sum of min(p, q): the probability of accepting a sampled draft after accepted ones.
    top1: share of tokens where both have the same most likely token: the same of a greedy draft.
    greedy: for each window, the expected tokens per verification with as many drafts as this depth's number:
        1 and, for each draft, the probability that it and all before it are accepted. The drafts follow the
        text, not the model's own continuation.
    sampled: the same at temperature 1.
    """

    kl: float
    overlap: float
    top1: float
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]


@dataclass(frozen=True)
class MeanLosses:
    """Mean losses in nats per token.

    depths, agreement: of MTP depth 1, 2, …
    tokens: labels of the next token; depth k has k fewer in each window.
    """

    next_token: float
    depths: tuple[float, ...]
    tokens: int
    agreement: tuple[DepthAgreement, ...] = ()


@dataclass(frozen=True)
class ConversationLosses:
    """Mean loss of the assistant's tokens in nats; conversations without one do not count."""

    per_token: float
    per_conversation: float
    tokens: int
    conversations: int

    @classmethod
    def of(cls, totals: Sequence[tuple[float, int]]) -> ConversationLosses:
        """From the sum of the losses of each conversation and its number of tokens, at least 1."""
        tokens, mean = sum(n for _, n in totals), sum(total / n for total, n in totals) / len(totals)
        return cls(sum(total for total, _ in totals) / tokens, mean, tokens, len(totals))


def windows(ids: Sequence[int], seq_length: int, tokens: int | None = None) -> Tensor:
    """Cut a text into windows; consecutive windows share one token.

    Args:
        ids: the text. An incomplete window at its end is dropped, unless it is the only one.
        seq_length: labels per window.
        tokens: labels at most, but at least one window; the windows are spread over the text.

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
def losses(
    engine: Engine,
    text: Tensor,
    depths: int,
    chunk: int = CHUNK,
    report: Callable[[int], None] = lambda tokens: None,
) -> MeanLosses:
    """Mean losses over windows of text.

    Args:
        text: [windows, s + 1] ids, from `windows`.
        depths: MTP depths, 0 or more; depths beyond those of training continue with the repeated block.
        chunk: positions per pass.
        report: called with the number of tokens of each group of windows that was measured.

    Raises:
        ValueError: s <= depths, ids outside the vocabulary, s beyond the context, or MTP the model lacks.
    """
    s = text.shape[1] - 1
    if s <= depths:
        raise ValueError(f"windows of {s} tokens have no label at MTP depth {depths}: use longer ones")
    engine.check_prompts([[int(text.min()), int(text.max())]], more=s - 2)
    chunk = min(chunk, s)
    groups = []
    for rows in text.to(engine.device).split(max(1, LOGIT_ROWS // chunk)):
        groups.append(_measure(engine, rows, depths, chunk))
        report(len(rows) * s)
    means = [sum(group[0][k] for group in groups) / (len(text) * (s - k)) for k in range(depths + 1)]
    agreement = []
    for k in range(depths):
        compared, expected = (torch.cat(parts) for parts in zip(*(group[1][k] for group in groups)))
        kl, overlap, top1 = compared.mean(0).tolist()
        greedy, sampled = expected.T.tolist()
        agreement.append(DepthAgreement(kl, overlap, top1, tuple(greedy), tuple(sampled)))
    return MeanLosses(means[0], tuple(means[1:]), len(text) * s, tuple(agreement))


def _measure(
    engine: Engine, rows: Tensor, depths: int, chunk: int
) -> tuple[list[float], list[tuple[Tensor, Tensor]]]:
    """Summed losses (model, depths) of rows [b, s + 1]; of each depth `_compare` [b, 3], tokens [b, 2]."""
    b, s = rows.shape[0], rows.shape[1] - 1
    state = engine.new_state(b, capacity=s)
    mtp = MTP(engine, b, depths, capacity=s) if depths else None
    sums, compared = [0.0] * (depths + 1), []
    trunk = hidden = torch.empty(0)  # of the depth before, at all positions
    accepted = torch.ones(b, s, 2, device=rows.device)  # probability that all drafts so far are
    expected = torch.ones(b, 2, device=rows.device, dtype=torch.float64)
    for depth in range(depths + 1):
        parts, agreed = [], []
        for at in range(0, s - depth, chunk):
            end = min(at + chunk, s - depth)
            tokens = rows[:, at + depth : end + depth]
            if mtp is None or depth == 0:
                out = engine.forward(tokens, state)
            else:
                out = mtp.forward(depth, hidden[:, at:end], tokens)
                own = trunk[:, at + depth : end + depth]
                agreed.append(_compare(engine, own.flatten(0, 1), out.logits.flatten(0, 1)).view(b, -1, 3))
            labels = rows[:, at + depth + 1 : end + depth + 1].flatten()
            found = cross_entropy(out.logits.flatten(0, 1).float(), labels, reduction="none")
            sums[depth] += float(found.double().sum())
            parts.append(out.hidden)
        hidden = torch.cat(parts, 1)
        if depth == 0:
            trunk = hidden
        else:
            here = torch.cat(agreed, 1)
            accepted = accepted[:, : s - depth] * here[..., 1:].flip(-1)
            expected = expected + accepted.double().mean(1)
            compared.append((here.double().mean(1), expected))
    return sums, compared


def _compare(engine: Engine, hidden: Tensor, drafted: Tensor) -> Tensor:
    """The model after hidden [n, d] against drafted logits [n, v]: KL, overlap, same top token [n, 3]."""
    rows = []
    for own, logits in zip(hidden.split(COMPARED_ROWS), drafted.split(COMPARED_ROWS)):
        p = engine.logits(own).float().log_softmax(-1)
        q = logits.float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        overlap = torch.minimum(p, q).exp().sum(-1)
        rows.append(torch.stack((kl, overlap, (p.argmax(-1) == q.argmax(-1)).float()), -1))
    return torch.cat(rows)


@torch.inference_mode()
def conversation_losses(
    engine: Engine, encoded: Sequence[Encoded], report: Callable[[int], None] = lambda tokens: None
) -> ConversationLosses:
    """Measure the loss of each conversation alone: the mean over tokens, and that of all means."""
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
    return ConversationLosses.of(sums)


def acceptance(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    drafts: Sequence[int],
    report: Callable[[int], None] = lambda tokens: None,
) -> list[Generation]:
    """Continue prompts greedily, once with each number of drafts; nothing ends a text early.

    Args:
        drafts: 0 is plain decoding.
        report: called with 1 for each new token.

    Raises:
        ValueError: as `generate`.
    """
    generate(engine, prompts, GenerationOptions(2, draft=max(drafts)))  # warm-up
    return [
        generate(engine, prompts, GenerationOptions(new_tokens, draft=draft), lambda row, token: report(1))
        for draft in drafts
    ]
