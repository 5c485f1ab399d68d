"""Speculative decoding by the model itself: MTP drafts, one pass verifies (arXiv 2211.17192).

    x          the newest token of a row, which no state has seen yet
    d1 … dk    drafted behind it by MTP, depth j the j-th
    forward(x, d1 … dk)    what the model gives behind x, d1, … dk
    accepted   the longest prefix of the drafts that the model agrees with, and one token of its own

The states of the model and of MTP then go back to the accepted tokens. Greedy: a draft is accepted if it is
the most likely token. Sampling: with probability min(1, p / q), p the model's probability of the draft and q
MTP's; a rejected one is replaced by a token drawn from what p has above q. Either way the text has the
distribution of plain decoding, whatever MTP proposes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_nemotron3.generate.engine import CHUNK, Engine
from megatron_nemotron3.generate.generate import Generation, OnToken, note, start
from megatron_nemotron3.generate.mtp import MTPState
from megatron_nemotron3.generate.sampling import GREEDY, Sampler, Sampling, draw, probabilities
from megatron_nemotron3.generate.state import State


@dataclass
class Speculation:
    """What drafting came to.

    Attributes:
        draft: tokens drafted a verification, at most: fewer where fewer are left to generate.
        steps: verifications, each row counted by itself.
        tokens: what they gave: accepted drafts and the model's own token of each. All new tokens but the
            first of each row, which the prefill gives.
        drafted: for each position how often a draft stood there; not behind a token that ended the row.
        accepted: for each position how often it was accepted, and so were those before it.
    """

    draft: int
    steps: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.draft
        self.accepted = self.accepted or [0] * self.draft

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification, the model's own token counted: 1 to draft + 1; 0.0 without any."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def by_position(self) -> list[float | None]:
        """Share of drafts at each position that were accepted; None: none was drafted there."""
        return [a / d if d else None for a, d in zip(self.accepted, self.drafted)]

    def note(self, drafted: int, new: int, emitted: int) -> None:
        """Count one verification of one row.

        Args:
            drafted: tokens drafted.
            new: tokens it gave, the accepted drafts and one.
            emitted: how many of them were taken; fewer if one ended the row.
        """
        self.steps += 1
        self.tokens += emitted
        for position in range(drafted if emitted == new else emitted):
            self.drafted[position] += 1
            self.accepted[position] += position < new - 1


@dataclass
class SpeculativeGeneration(Generation):
    """What `speculate` returns.

    Attributes:
        speculation: of all rows together.
    """

    speculation: Speculation = field(default_factory=lambda: Speculation(0))


class Batch:
    """Sequences that are being continued: states, the newest token of each, and the dice.

    Args:
        prompts: token ids of each row; they are read here.
        draft: tokens to draft a step at most; 0: plain decoding, without MTP.
        capacity: places that attention layers have at first.

    Raises:
        ValueError: the model has no MTP block, or too few blocks where each depth has its own.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        draft: int,
        sampling: Sampling = GREEDY,
        *,
        chunk: int = CHUNK,
        capacity: int = 256,
    ) -> None:
        self.engine, self.draft = engine, draft
        self.state: State = engine.new_state(len(prompts), capacity=capacity)
        self.mtp: MTPState | None = None
        if draft:
            self.mtp = engine.new_mtp_state(len(prompts), draft, capacity=capacity)
        logits = engine.prefill(prompts, self.state, chunk=chunk, mtp=self.mtp).logits
        assert logits is not None
        self.sampler = Sampler(sampling, range(len(prompts)))
        #: [b], not yet seen by the states.
        self.newest: Tensor = self.sampler(logits)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows."""
        self.state, self.sampler = self.state.select(rows), self.sampler.select(rows)
        self.mtp = None if self.mtp is None else self.mtp.select(rows)
        self.newest = self.newest[list(rows)]

    def step(self, limits: Sequence[int]) -> list[list[int]]:
        """Draft, verify, go back to what was accepted.

        Args:
            limits: for each row how many tokens may be drafted, 0 or more.

        Returns:
            The new tokens of each row: 1 to min(limit, draft) + 1. The last is now the newest.
        """
        engine, greedy = self.engine, self.sampler.sampling.greedy
        limits = [min(limit, self.draft) for limit in limits]
        k = max(limits)
        # As many numbers for every row and step, so that a row does not depend on those beside it.
        numbers = None if greedy else self._numbers()
        proposed: list[Tensor] = []

        def choose(logits: Tensor) -> Tensor:
            if numbers is None:
                return logits.argmax(-1)
            proposed.append(probabilities(logits, self.sampler.sampling))
            return draw(proposed[-1], numbers[:, len(proposed) - 1])

        tokens = self.newest.unsqueeze(1)
        if k:
            assert self.mtp is not None
            tokens = torch.cat((tokens, engine.mtp_draft(self.mtp, self.newest, choose, k)), 1)
        counts = [limit + 1 for limit in limits] if min(limits) < k else None
        out = engine.forward(tokens, self.state, counts=counts, keep=k > 0)
        assert out.logits is not None
        allowed = torch.tensor(limits, device=engine.device)
        if numbers is None:
            accepted, own = accept_greedy(out.logits, tokens[:, 1:], allowed)
        else:
            accepted, own = accept(
                probabilities(out.logits, self.sampler.sampling),
                torch.stack(proposed, 1) if k else out.logits[:, :0].float(),
                tokens[:, 1:],
                allowed,
                numbers[:, self.draft : self.draft + k],
                numbers[:, -1],
            )
        rows = torch.cat((tokens[:, 1:], own.unsqueeze(1), accepted.unsqueeze(1)), 1).tolist()
        kept = [row[-1] + 1 for row in rows]
        if out.tape is not None:
            self.state.truncate(kept, out.tape)
        if self.mtp is not None:
            n = max(kept)
            ragged = kept if min(kept) < n else None
            engine.mtp_append(self.mtp, tokens[:, :n], out.hidden[:, :n], counts=ragged)
        self.newest = own
        return [[*row[: row[-1]], row[-2]] for row in rows]

    def _numbers(self) -> Tensor:
        """[b, 2 draft + 1] in [0, 1): to draft, to accept, and for the model's own token."""
        cpu = torch.device("cpu")
        numbers = [self.sampler.uniform(cpu) for _ in range(2 * self.draft + 1)]
        return torch.stack(numbers, 1).to(self.engine.device)


def accept_greedy(logits: Tensor, drafted: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Which drafts are the most likely tokens.

    Args:
        logits: [b, k + 1, vocabulary], behind the newest token and behind each draft.
        drafted: [b, k].
        limits: [b], drafts that count, 0 to k.

    Returns:
        [b] how many are accepted, and [b] the model's token behind them.
    """
    best = logits.argmax(-1)
    accepted = _prefix(drafted == best[:, :-1], limits)
    return accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1)


def accept(
    p: Tensor, q: Tensor, drafted: Tensor, limits: Tensor, to_accept: Tensor, to_draw: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafts so that tokens have the distribution p (arXiv 2211.17192, algorithm 1).

    Args:
        p: [b, k + 1, vocabulary], the model's probabilities behind the newest token and behind each draft.
        q: [b, k, vocabulary], those that the drafts were drawn from.
        drafted: [b, k].
        limits: [b], drafts that count, 0 to k.
        to_accept, to_draw: [b, k] and [b], independent and uniform in [0, 1).

    Returns:
        [b] how many are accepted, and [b] the token behind them: from the normalized positive part of p - q
        where a draft was rejected, else from p.
    """
    k, index = drafted.shape[1], drafted.unsqueeze(-1)
    agreed = to_accept * q.gather(-1, index).squeeze(-1) < p[:, :k].gather(-1, index).squeeze(-1)
    accepted = _prefix(agreed, limits)
    rows = torch.arange(len(p), device=p.device)
    own = p[rows, accepted]
    if k:
        left = (own - q[rows, accepted.clamp(max=k - 1)]).clamp_min_(0)
        # Nothing is left where p and q differ by rounding only.
        rejected = (accepted < limits) & (left.sum(-1) > 0)
        own = torch.where(rejected.unsqueeze(1), left, own)
    return accepted, draw(own, to_draw)


def speculate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    draft: int,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
    chunk: int = CHUNK,
    on_token: OnToken | None = None,
) -> SpeculativeGeneration:
    """Continue prompts as `generate` does, several tokens a pass.

    The greedy text is that of `generate` up to rounding: a pass over k + 1 tokens sums in another order than
    one over a single token, so where two logits are equal to that precision either may win. A sampled text
    has the same distribution, not the same tokens. A row does not depend on those beside it.

    Args:
        draft: tokens to draft, from 0 (plain decoding) on. More than the model was trained with go on with
            the repeated block.
        on_token: called as tokens appear; a row for which it returns True ends.
        prompts, max_new_tokens, sampling, stop, chunk: as `generate`.

    Raises:
        ValueError: as `generate`; also draft < 0, a model without MTP, or one with a block for each depth
            and fewer of them.
    """
    if draft < 0:
        raise ValueError(f"draft={draft}: use 0 (no drafts) or more")
    checked = start(engine, prompts, max_new_tokens)
    result = SpeculativeGeneration(checked.rows, checked.prompt_tokens, speculation=Speculation(draft))
    ends = frozenset(stop)
    with torch.inference_mode():
        began = time.perf_counter()
        longest = max(map(len, prompts)) + max_new_tokens
        batch = Batch(engine, prompts, draft, sampling, chunk=chunk, capacity=min(longest, 4096))
        new = [[token] for token in batch.newest.tolist()]
        result.prefill_seconds = time.perf_counter() - began
        began = time.perf_counter()
        active = list(range(len(prompts)))
        limits: list[int] = []
        while True:
            going = []
            for place, (row, tokens) in enumerate(zip(active, new)):
                before = len(result.rows[row].tokens)
                ended = note(result.rows[row], row, tokens, ends, max_new_tokens, on_token)
                if limits:
                    emitted = len(result.rows[row].tokens) - before
                    result.speculation.note(limits[place], len(tokens), emitted)
                if not ended:
                    going.append(place)
            if not going:
                break
            if len(going) < len(active):
                active = [active[place] for place in going]
                batch.select(going)
            # The model adds a token of its own, so one draft fewer than are left.
            limits = [min(draft, max_new_tokens - len(result.rows[row].tokens) - 1) for row in active]
            new = batch.step(limits)
            result.passes += 1
        result.decode_seconds = time.perf_counter() - began
    return result


def _prefix(agreed: Tensor, limits: Tensor) -> Tensor:
    """[b, k] -> [b], how many come before the first that is not agreed or beyond the limit."""
    within = torch.arange(agreed.shape[1], device=agreed.device) < limits.unsqueeze(1)
    return (agreed & within).long().cumprod(1).sum(1)
