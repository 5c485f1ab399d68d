"""Prompts -> continuations, one token a pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from megatron_nemotron3.generate.engine import CHUNK, Engine
from megatron_nemotron3.generate.sampling import GREEDY, Sampler, Sampling

#: Gets (row, token) for every new token; True ends the row.
OnToken = Callable[[int, int], bool | None]


@dataclass
class Continuation:
    """What was generated behind one prompt.

    Attributes:
        tokens: the new ones; the last is a stop token if `stopped`.
        stopped: whether a stop token ended it; otherwise it is as long as was asked for.
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass
class Generation:
    """What `generate` returns.

    Attributes:
        rows: one continuation a prompt.
        prompt_tokens: of all prompts.
        prefill_seconds: until the first logits.
        decode_seconds: from there to the end.
        passes: forward passes of the model after the prefill.
    """

    rows: list[Continuation]
    prompt_tokens: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    passes: int = 0

    @property
    def new_tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """New tokens without each row's first, which the prefill gives, over the seconds of decoding."""
        return (self.new_tokens - len(self.rows)) / self.decode_seconds if self.passes else 0.0


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
    chunk: int = CHUNK,
    on_token: OnToken | None = None,
) -> Generation:
    """Continue prompts, all at once; a row that has stopped leaves the batch.

    Args:
        prompts: token ids, of any lengths.
        max_new_tokens: of each row, > 0.
        stop: ids that end a row.
        chunk: tokens of one pass of the prefill.
        on_token: called as tokens appear; a row for which it returns True ends.

    Raises:
        ValueError: no prompts or an empty one, an id outside the vocabulary, max_new_tokens < 1, or prompt
            and new tokens together beyond `engine.max_context`.
    """
    result = start(engine, prompts, max_new_tokens)
    stop = frozenset(stop)
    with torch.inference_mode():
        began = time.perf_counter()
        longest = max(map(len, prompts)) + max_new_tokens
        state = engine.new_state(len(prompts), capacity=min(longest, 4096))
        logits = engine.prefill(prompts, state, chunk=chunk).logits
        assert logits is not None
        sampler = Sampler(sampling, range(len(prompts)))
        tokens = sampler(logits)
        active = list(range(len(prompts)))
        found = tokens.tolist()
        result.prefill_seconds = time.perf_counter() - began
        began = time.perf_counter()
        while True:
            going = [
                place
                for place, (row, token) in enumerate(zip(active, found))
                if not note(result.rows[row], row, [token], stop, max_new_tokens, on_token)
            ]
            if not going:
                break
            if len(going) < len(active):
                active = [active[place] for place in going]
                state, sampler = state.select(going), sampler.select(going)
                tokens = tokens[going]
            logits = engine.forward(tokens.unsqueeze(1), state, logits="last").logits
            assert logits is not None
            tokens = sampler(logits)
            found = tokens.tolist()
            result.passes += 1
        result.decode_seconds = time.perf_counter() - began
    return result


def start(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Generation:
    """An empty result for valid arguments; errors as `generate`."""
    if len(prompts) == 0:
        raise ValueError("no prompts: give at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: use 1 or more")
    engine.check(prompts, more=max_new_tokens)
    return Generation([Continuation() for _ in prompts], sum(map(len, prompts)))


def note(
    row: Continuation, place: int, new: list[int], stop: frozenset[int], most: int, on_token: OnToken | None
) -> bool:
    """Add new tokens to a row up to one that ends it; whether the row is finished."""
    for token in new:
        row.tokens.append(token)
        row.stopped = token in stop
        enough = on_token is not None and on_token(place, token) is True
        if row.stopped or enough or len(row.tokens) >= most:
            return True
    return False
