"""A model that runs token by token: chunked prefill, forward passes over a state, rollback."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch, last_of_rows, on_device
from megatron_nemotron3.inference.generate.decode import Decode, DecodeState, Rollback

#: Tokens per prefill pass. Activation memory grows with it, KV caches with the sequence.
CHUNK = 512
#: Tokens per row that a KV cache has room for at first.
CAPACITY = 256

#: Called with tokens [b, n], hidden [b, n, d] and each row's number of tokens after a pass.
OnChunk = Callable[[Tensor, Tensor, Sequence[int]], None]


@dataclass(frozen=True)
class EncoderRows:
    """Rows [rows, d] of encoders that replace the embeddings at `positions` of a prompt."""

    positions: Sequence[int]
    values: Tensor


@dataclass(frozen=True)
class Output:
    """The result of a pass over [b, n] tokens.

    hidden: after the final norm, [b, n, d]; from a prefill [b, d] at each row's last token.
    """

    engine: Engine
    hidden: Tensor
    rollback: Rollback | None = None

    @cached_property
    def logits(self) -> Tensor:
        """[b, n, vocabulary], or [b, vocabulary] from a prefill; computed when first read."""
        return self.engine.logits(self.hidden)


class Engine:
    """A model on one device.

    Args:
        model: from `load`.
        max_context: tokens a sequence may have; default: the model's `max_position_embeddings`. No layer
            encodes positions, so longer contexts compute; their quality depends on the training.
        media: ids that stand for rows of encoders; a prompt without the rows is refused.
    """

    def __init__(self, model: Decode, *, max_context: int | None = None, media: Collection[int] = ()) -> None:
        self.model, self.config, self.device, self.dtype = model, model.config, model.device, model.dtype
        self.max_context = model.config.max_position_embeddings if max_context is None else max_context
        self.media = frozenset(media)

    def new_state(self, batch: int = 1, capacity: int = CAPACITY) -> DecodeState:
        """Return the state of `batch` empty sequences.

        Args:
            capacity: tokens per row that KV caches have room for at first; it doubles when needed.
        """
        return self.model.new_state(self.model.layers, batch, capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        state: DecodeState,
        *,
        counts: Sequence[int] | None = None,
        rollback: bool = False,
        embeddings: Tensor | None = None,
    ) -> Output:
        """Run n tokens per row after those the state has seen, and advance the state.

        Args:
            tokens: [b, n] ids; they are not checked here.
            counts: tokens of each row, where some have fewer than n. The rest is padding and may be any valid
                ids. A row's result is the same as in a batch of its own; outputs at padding are undefined.
            rollback: also return what `DecodeState.truncate` needs.
            embeddings: of the tokens, [b, n, d]; default: the model's.

        Raises:
            ValueError: tokens that are not [b, n] with the state's b and n > 0, counts that do not fit, or
                a context beyond `max_context`.
        """
        run = self.new_run(tokens, state, counts, rollback)
        x = self.model.embed(tokens) if embeddings is None else embeddings
        return self.finish(self.model.decoder(x.flatten(0, 1), run), state, run)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        state: DecodeState,
        *,
        chunk: int = CHUNK,
        on_chunk: OnChunk | None = None,
        rows: Sequence[EncoderRows | None] = (),
    ) -> Output:
        """Read prompts chunk by chunk, so that activation memory does not grow with their length.

        Args:
            prompts: one per row of the state, of any lengths; or [b, n] ids.
            chunk: tokens per pass, > 0.
            on_chunk: called after each pass; `MTP.append` runs the MTP block over the prompts.
            rows: of encoders, for each prompt; default: none.

        Returns:
            Logits [b, vocabulary] and hidden [b, d] at the last token of each prompt.

        Raises:
            ValueError: another number of prompts than rows of the state, an empty prompt, an id outside the
                vocabulary, one of `media` without its row or the reverse, a context beyond `max_context`.
        """
        texts = prompts.tolist() if isinstance(prompts, Tensor) else [list(prompt) for prompt in prompts]
        if len(texts) != state.batch:
            raise ValueError(f"{len(texts)} prompts for a state of {state.batch} rows: give one per row")
        self.check_prompts(texts, state.lengths, rows=rows)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} tokens: use 1 or more")
        longest = max(map(len, texts))
        padded = on_device([text + [0] * (longest - len(text)) for text in texts], self.device)
        last = torch.zeros(len(texts), self.config.hidden_size, dtype=self.dtype, device=self.device)
        for start in range(0, longest, chunk):
            tokens = padded[:, start : start + chunk]
            counts = [min(max(len(text) - start, 0), tokens.shape[1]) for text in texts]
            embeddings = _put_rows(self.model.embed(tokens), rows, start)
            hidden = self.forward(tokens, state, counts=counts, embeddings=embeddings).hidden
            if on_chunk is not None:
                on_chunk(tokens, hidden, counts)
            some = on_device([count > 0 for count in counts], self.device).unsqueeze(1)
            last = torch.where(some, last_of_rows(hidden, counts), last)
        return Output(self, last)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] after a final norm -> [..., vocabulary], as `Decode.logits`."""
        return self.model.logits(hidden)

    def new_run(
        self,
        tokens: Tensor,
        state: DecodeState,
        counts: Sequence[int] | None,
        rollback: bool,
        last: bool = False,
    ) -> ForwardBatch:
        """Describe a pass over tokens [b, n]. Arguments and errors as for `forward`."""
        if tokens.dim() != 2 or tokens.shape[0] != state.batch or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must be [b, n] with n > 0 and b={state.batch} as in the state"
            )
        run = ForwardBatch(state.lengths, tokens.shape[1], counts, self.device, rollback, state.layers)
        run.last = last
        if run.end > self.max_context:
            for row, (length, count) in enumerate(zip(state.lengths, run.counts)):
                self._check_context(row, length + count)
        return run

    def finish(self, hidden: Tensor, state: DecodeState, run: ForwardBatch) -> Output:
        """Advance the state by a pass that gave hidden [b * n, d]."""
        rollback = Rollback(state.lengths, run.counts, run.scans) if run.rollback else None
        state.lengths = [a + c for a, c in zip(state.lengths, run.counts)]
        return Output(self, hidden.view(run.b, -1, hidden.shape[-1]), rollback)

    def check_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int] = (),
        more: int = 0,
        rows: Sequence[EncoderRows | None] = (),
    ) -> None:
        """Refuse prompts that cannot follow `lengths` tokens and precede `more`. Errors as for `prefill`."""
        if len(rows) not in (0, len(prompts)):
            raise ValueError(f"rows for {len(rows)} of {len(prompts)} prompts: give an entry for each")
        vocabulary = self.config.vocab_size
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {row} is empty: give at least one token, such as the BOS token")
            wrong = next((t for t in (min(prompt), max(prompt)) if not 0 <= t < vocabulary), None)
            if wrong is not None:
                raise ValueError(
                    f"prompt {row} has token id {wrong}; {self.config.name} has the ids 0 to "
                    f"{vocabulary - 1}: is it another model's tokenizer?"
                )
            self._check_rows(row, prompt, rows[row] if rows else None)
            self._check_context(row, (lengths[row] if lengths else 0) + len(prompt) + more)

    def _check_rows(self, row: int, prompt: Sequence[int], rows: EncoderRows | None) -> None:
        positions = () if rows is None else rows.positions
        if rows is not None and (
            len(positions) != len(rows.values) or not all(0 <= at < len(prompt) for at in positions)
        ):
            raise ValueError(
                f"prompt {row} has {len(rows.values)} rows for {len(positions)} positions in its "
                f"{len(prompt)} tokens: give one row for each position"
            )
        known = set(positions)
        bare = (t for at, t in enumerate(prompt) if t in self.media and at not in known)
        if (token := next(bare, None)) is not None:
            raise ValueError(
                f"prompt {row} has token id {token}, which stands for a row of an encoder, without the row"
            )

    def _check_context(self, row: int, context: int) -> None:
        if context > self.max_context:
            raise ValueError(
                f"row {row} would have {context:,} tokens, more than max_context={self.max_context:,}: "
                "shorten it, or raise max_context (no layer encodes positions; the default is the model's "
                "max_position_embeddings)"
            )


def _put_rows(embedded: Tensor, rows: Sequence[EncoderRows | None], start: int) -> Tensor:
    """Put rows of encoders into the embeddings [b, n, d] of the tokens from `start` on."""
    for text, one in zip(embedded, rows):
        places = enumerate(() if one is None else one.positions)
        here = [(i, at - start) for i, at in places if start <= at < start + len(text)]
        if one is not None and here:
            numbers, positions = map(list, zip(*here))
            text[positions] = one.values[numbers].to(text)
    return embedded
