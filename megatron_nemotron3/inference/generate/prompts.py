"""Prompts to continuations: plain decoding, or speculative decoding with the model's own MTP as the drafter.

MTP drafts d1 … dk after the newest token x of a row, depth j the j-th. One pass gives the model's predictions
after x, d1, … dk. The longest prefix of drafts that it agrees with is accepted, and one token of its own; the
states are rolled back to these. Greedy decoding accepts a draft that is the most likely token. Sampling
accepts it with probability min(1, p / q), where p is the model's probability of the draft and q is MTP's; a
rejected one is replaced by a token drawn from the positive part of p - q (arXiv 2211.17192). So the text has
the distribution of plain decoding, whatever MTP proposes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import on_device
from megatron_nemotron3.inference.generate.decode import DecodeState
from megatron_nemotron3.inference.generate.engine import CHUNK, EncoderRows, Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.sampling import (
    GREEDY,
    Sampler,
    Sampling,
    accept,
    draw,
    probabilities,
)

#: Called with (row, token) for every new token; a return value of True ends the row.
OnToken = Callable[[int, int], bool | None]
#: Tokens per row that KV caches reserve at first, at most.
MAX_RESERVED = 4096


@dataclass(frozen=True)
class GenerationOptions:
    """How prompts are continued.

    Args:
        max_new_tokens: of each row, > 0.
        sampling: default: greedy.
        draft: tokens that MTP drafts per verification; 0 is plain decoding. More than the model was trained
            with continue with the repeated block.
        stop: ids that end a row.
        chunk: tokens per prefill pass.
        logprobs: also return the log-probability of each new token, by the model at temperature 1.

    Raises:
        ValueError: max_new_tokens < 1, or draft < 0.
    """

    max_new_tokens: int
    sampling: Sampling = GREEDY
    draft: int = 0
    stop: Collection[int] = ()
    chunk: int = CHUNK
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: use 1 or more")
        if self.draft < 0:
            raise ValueError(f"draft={self.draft}: use 0 (no drafts) or more")


@dataclass
class Continuation:
    """The new tokens after one prompt; the last is a stop token if `stopped`.

    logprobs: natural logarithm of each token's probability at temperature 1, without top-k and top-p; empty
        unless `GenerationOptions.logprobs`.
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Speculation:
    """Statistics of drafting.

    draft: most tokens drafted per verification; fewer are drafted where fewer are left to generate.
    steps: verifications, counted for each row.
    tokens: accepted drafts and the model's own token of each verification. All new tokens count except the
        first of each row, which the prefill gives.
    drafted: for each position, the number of drafts verified there, up to the token that ended the row.
    accepted: for each position, the number of drafts that were accepted with all before them.
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
        """Mean tokens per verification, the model's own token included: 1 to draft + 1; 0.0 without any."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def by_position(self) -> list[float | None]:
        """Share of the drafts at each position that were accepted; None where none was drafted."""
        return [a / d if d else None for a, d in zip(self.accepted, self.drafted)]

    def count(self, drafted: int, new: int, emitted: int) -> None:
        self.steps += 1
        self.tokens += emitted
        for position in range(drafted if emitted == new else emitted):
            self.drafted[position] += 1
            self.accepted[position] += position < new - 1


@dataclass
class Generation:
    """The result of `generate`.

    prefill_seconds, decode_seconds: until the first tokens, and from there to the end.
    passes: forward passes of the model after the prefill.
    """

    rows: list[Continuation]
    prompt_tokens: int
    speculation: Speculation
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    passes: int = 0

    @property
    def new_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """New tokens without each row's first, which the prefill gives, per second of decoding."""
        return (self.new_tokens - len(self.rows)) / self.decode_seconds if self.passes else 0.0


@dataclass
class ConversationState:
    """What the states have seen of a conversation, for a prompt that follows; `generate` updates it."""

    state: DecodeState | None = None
    mtp: MTP | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row; empty if nothing was read yet."""
        return [] if self.state is None else self.state.lengths


class Decoder:
    """Sequences that are being continued: their states, newest tokens and random numbers.

    prompts: token ids of each row; they are read here.
    before: the states of what is in front of the prompts.
    rows: of encoders in each prompt.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        before: ConversationState | None = None,
        rows: Sequence[EncoderRows | None] = (),
    ) -> None:
        self.engine, self.draft = engine, options.draft
        capacity = min(max(map(len, prompts)) + options.max_new_tokens, MAX_RESERVED)
        if before is not None and before.state is not None:
            self.state, self.mtp = before.state, before.mtp
        else:
            self.state = engine.new_state(len(prompts), capacity)
            self.mtp = MTP(engine, len(prompts), self.draft, capacity) if self.draft else None
        if before is not None:
            before.state, before.mtp = self.state, self.mtp
        on_chunk = None if self.mtp is None else self.mtp.append
        read = engine.prefill(prompts, self.state, chunk=options.chunk, on_chunk=on_chunk, rows=rows)
        self.sampler = Sampler(options.sampling, range(len(prompts)))
        #: [b], not yet seen by the states.
        self.newest: Tensor = self.sampler(read.logits)
        #: Log-probabilities of the tokens of each row that the last pass gave, if they are wanted.
        self.logprobs: list[list[float]] | None = [] if options.logprobs else None
        self._score(read.logits.unsqueeze(1), [[token] for token in self.newest.tolist()])

    def select(self, rows: Sequence[int]) -> None:
        self.state, self.sampler = self.state.select(rows), self.sampler.select(rows)
        self.mtp = None if self.mtp is None else self.mtp.select(rows)
        self.newest = self.newest[list(rows)]

    def step(self, limits: Sequence[int]) -> list[list[int]]:
        """Draft, verify, and roll back to the accepted tokens."""
        if self.mtp is None:
            out = self.engine.forward(self.newest.unsqueeze(1), self.state)
            self.newest = self.sampler(out.logits.squeeze(1))
            new = [[token] for token in self.newest.tolist()]
            self._score(out.logits, new)
            return new
        limits = [min(limit, self.draft) for limit in limits]
        k = max(limits)
        # The same number of random numbers for every row and step, so that rows do not affect each other.
        # To draft, to accept, and for the model's own token.
        numbers = None
        if not self.sampler.sampling.greedy:
            numbers = self.sampler.uniform(2 * self.draft + 1).to(self.engine.device, non_blocking=True)
        drafted, q = self._draft_tokens(self.mtp, k, numbers)
        tokens = torch.cat((self.newest.unsqueeze(1), drafted), 1)
        counts = [limit + 1 for limit in limits]
        out = self.engine.forward(tokens, self.state, counts=counts, rollback=k > 0)
        if numbers is None:
            best = out.logits.argmax(-1)
            rows = torch.cat((drafted, best), 1).tolist()
            new = [_accepted(row[:k], row[k:], limit) for row, limit in zip(rows, limits)]
            own = on_device([tokens[-1] for tokens in new], self.engine.device)
        else:
            p = probabilities(out.logits, self.sampler.sampling)
            to_accept = numbers[:, self.draft : self.draft + k]
            allowed = on_device(limits, self.engine.device)
            accepted, own = accept(
                p, torch.stack(q, 1) if k else p[:, :0], drafted, allowed, to_accept, numbers[:, -1]
            )
            rows = torch.cat((drafted, own.unsqueeze(1), accepted.unsqueeze(1)), 1).tolist()
            new = [[*row[: row[-1]], row[-2]] for row in rows]
        self._score(out.logits, new)
        kept = [len(tokens) for tokens in new]
        if out.rollback is not None:
            self.state.truncate(kept, out.rollback)
        n = max(kept)
        self.mtp.append(tokens[:, :n], out.hidden[:, :n], kept)
        self.newest = own
        return new

    def _score(self, logits: Tensor, new: Sequence[Sequence[int]]) -> None:
        """Keep the log-probabilities of new tokens, of logits [b, n, vocabulary], if they are wanted."""
        if self.logprobs is None:
            return
        width = max(map(len, new))
        index = on_device([[*row, *[0] * (width - len(row))] for row in new], logits.device)
        values = logits[:, :width].float().log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        self.logprobs = [row[: len(tokens)] for row, tokens in zip(values.tolist(), new)]

    def _draft_tokens(self, mtp: MTP, k: int, numbers: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Drafts [b, k], and with random numbers the distributions [b, vocabulary] they are drawn from."""
        proposed: list[Tensor] = []

        def choose(logits: Tensor) -> Tensor:
            if numbers is None:
                return logits.argmax(-1)
            proposed.append(probabilities(logits, self.sampler.sampling))
            return draw(proposed[-1], numbers[:, len(proposed) - 1])

        drafted = mtp.draft(self.newest, choose, k) if k else self.newest.new_empty(len(self.newest), 0)
        return drafted, proposed


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    on_token: OnToken | None = None,
    before: ConversationState | None = None,
    rows: Sequence[EncoderRows | None] = (),
) -> Generation:
    """Continue prompts in one batch; a row that has ended leaves the batch.

    With drafts, the greedy text is that of plain decoding up to rounding: a pass over k + 1 tokens sums in
    another order than one over a single token, so where two logits are equal to that precision either may
    win. A sampled text has the same distribution, not the same tokens. Rows do not affect each other.

    Args:
        prompts: token ids, of any lengths.
        on_token: called for each token as it appears; a row for which it returns True ends.
        before: the states of one row, which the prompt continues. Afterwards they have seen the prompt and
            all new tokens but the last; with drafts also those after a token that ended the row.
        rows: of encoders, for each prompt, in place of the embeddings of some of its tokens; without drafts.

    Raises:
        ValueError: no prompts or an empty one, an id outside the vocabulary, prompt and new tokens together
            beyond `engine.max_context`, or drafts that the model's MTP cannot make.
    """
    if len(prompts) == 0:
        raise ValueError("no prompts: give at least one")
    if text := next((one for one in prompts if isinstance(one, str)), None):
        raise ValueError(f"prompt {text[:40]!r} is a text: give token ids, as Tokenizer.encode makes them")
    if before is not None and len(prompts) > 1:
        raise ValueError("the states of a conversation go with one prompt")
    if any(rows) and options.draft:
        raise ValueError(f"draft={options.draft}: MTP does not see the rows of encoders: use 0")
    lengths = before.lengths if before is not None else ()
    engine.check_prompts(prompts, lengths, options.max_new_tokens, rows)
    result = Generation([Continuation() for _ in prompts], sum(map(len, prompts)), Speculation(options.draft))
    with torch.inference_mode():
        began = time.perf_counter()
        decoder = Decoder(engine, prompts, options, before, rows)
        new = [[token] for token in decoder.newest.tolist()]
        result.prefill_seconds = time.perf_counter() - began
        began = time.perf_counter()
        active = list(range(len(prompts)))
        limits: list[int] = []
        while True:
            going = []
            for index, (row, tokens) in enumerate(zip(active, new)):
                known = len(result.rows[row].tokens)
                if not _extend_row(result, row, tokens, options, on_token):
                    going.append(index)
                emitted = len(result.rows[row].tokens) - known
                if decoder.logprobs is not None:
                    result.rows[row].logprobs += decoder.logprobs[index][:emitted]
                if limits:
                    result.speculation.count(limits[index], len(tokens), emitted)
            if not going:
                break
            if len(going) < len(active):
                active = [active[index] for index in going]
                decoder.select(going)
            # The model adds a token of its own, so one draft fewer than tokens are left.
            limits = [
                min(options.draft, options.max_new_tokens - len(result.rows[row].tokens) - 1)
                for row in active
            ]
            new = decoder.step(limits)
            result.passes += 1
        result.decode_seconds = time.perf_counter() - began
    return result


def _accepted(drafted: list[int], best: list[int], limit: int) -> list[int]:
    """The drafts of a row that are the most likely tokens, and the model's token after them."""
    n = 0
    while n < limit and drafted[n] == best[n]:
        n += 1
    return best[: n + 1]


def _extend_row(
    result: Generation, row: int, new: list[int], options: GenerationOptions, on_token: OnToken | None
) -> bool:
    """Append new tokens to a row, up to one that ends it; return whether the row has ended."""
    continuation = result.rows[row]
    for token in new:
        continuation.tokens.append(token)
        continuation.stopped = token in options.stop
        ended = on_token is not None and on_token(row, token) is True
        if continuation.stopped or ended or len(continuation.tokens) >= options.max_new_tokens:
            return True
    return False
