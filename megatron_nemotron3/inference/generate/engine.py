"""A model that runs token by token: chunked prefill, forward passes over a state, rollback."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch, on_device
from megatron_nemotron3.inference.generate.layers import DecodeLayer, GroupNorm
from megatron_nemotron3.inference.generate.state import DecodeState, Rollback
from megatron_nemotron3.inference.generate.weights import Weights

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
        weights: from `load`.
        max_context: tokens a sequence may have; default: the model's `max_position_embeddings`. No layer
            encodes positions, so longer contexts compute; their quality depends on the training.
        media: ids that stand for rows of encoders; a prompt without the rows is refused.
    """

    def __init__(
        self, weights: Weights, *, max_context: int | None = None, media: Collection[int] = ()
    ) -> None:
        self.weights, self.config = weights, weights.config
        self.device, self.dtype = weights.device, weights.dtype
        self.max_context = weights.config.max_position_embeddings if max_context is None else max_context
        self.media = frozenset(media)

    def new_state(
        self, batch: int = 1, capacity: int = CAPACITY, layers: Sequence[DecodeLayer] | None = None
    ) -> DecodeState:
        """Return the state of `batch` empty sequences.

        Args:
            capacity: tokens per row that KV caches have room for at first; it doubles when needed.
            layers: default: the model's, without MTP.
        """
        layers = self.weights.layers if layers is None else layers
        return DecodeState([0] * batch, [layer.new_state(batch, capacity) for layer in layers])

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
        batch = self.new_batch(tokens, state, counts, rollback)
        x = self.embed(tokens) if embeddings is None else embeddings.flatten(0, 1)
        return self.run_layers(self.weights.layers, self.weights.final_norm, x, state, batch)

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
        encoded = _PromptRows(rows, longest, self.weights.embedding) if any(rows) else None
        last = self.weights.embedding.new_zeros(len(texts), self.config.hidden_size)
        for start in range(0, longest, chunk):
            tokens = padded[:, start : start + chunk]
            counts = [min(max(len(text) - start, 0), tokens.shape[1]) for text in texts]
            embeddings = None if encoded is None else encoded.put(self.embed(tokens), start)
            hidden = self.forward(tokens, state, counts=counts, embeddings=embeddings).hidden
            if on_chunk is not None:
                on_chunk(tokens, hidden, counts)
            some = on_device([count > 0 for count in counts], self.device).unsqueeze(1)
            last = torch.where(some, last_of_rows(hidden, counts), last)
        return Output(self, last)

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [b, n] to their embeddings [b * n, d]."""
        return self.weights.embedding.index_select(0, tokens.reshape(-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] after a final norm -> [..., vocabulary], as `Weights.logits`."""
        return self.weights.logits(hidden)

    def run_layers(
        self,
        layers: Sequence[DecodeLayer],
        final_norm: GroupNorm,
        x: Tensor,
        state: DecodeState,
        batch: ForwardBatch,
        last: bool = False,
    ) -> Output:
        """Run x [b * n, d] through a stack of layers and its final norm, and advance `state`.

        Args:
            last: the output is only that of each row's last token, [b, 1, d]. Layers after the last one
                with a state run on nothing else.
        """
        records = []
        stateless = 1 + max((i for i, one in enumerate(state.layers) if one is not None), default=-1)
        for number, (layer, layer_state) in enumerate(zip(layers, state.layers)):
            if last and number == stateless:
                x = last_of_rows(x.view(batch.b, batch.n, -1), batch.counts)
            x, record = layer(x, layer_state, batch)
            records.append(record)
        if last and len(x) > batch.b:
            x = last_of_rows(x.view(batch.b, batch.n, -1), batch.counts)
        rollback = Rollback(state.lengths, batch.counts, records) if batch.rollback else None
        state.lengths = [a + c for a, c in zip(state.lengths, batch.counts)]
        return Output(self, final_norm(x).view(batch.b, 1 if last else batch.n, -1), rollback)

    def new_batch(
        self, tokens: Tensor, state: DecodeState, counts: Sequence[int] | None, rollback: bool
    ) -> ForwardBatch:
        """Describe a pass over tokens [b, n]. Arguments and errors as for `forward`."""
        if tokens.dim() != 2 or tokens.shape[0] != state.batch or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must be [b, n] with n > 0 and b={state.batch} as in the state"
            )
        batch = ForwardBatch(state.lengths, tokens.shape[1], counts, self.device, rollback)
        if batch.end > self.max_context:
            for row, (length, count) in enumerate(zip(state.lengths, batch.counts)):
                self._check_context(row, length + count)
        return batch

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


class _PromptRows:
    """Rows of several prompts, found by position; `like` says their device and type."""

    def __init__(self, rows: Sequence[EncoderRows | None], longest: int, like: Tensor) -> None:
        self.values = torch.cat([one.values for one in rows if one is not None]).to(like)
        #: [b, longest]: number of the row in `values`, or -1.
        where = torch.full((len(rows), longest), -1)
        taken = 0
        for number, one in enumerate(rows):
            if one is not None:
                end = taken + len(one.positions)
                where[number, list(one.positions)] = torch.arange(taken, end)
                taken = end
        self.where = where.to(like.device, non_blocking=True)

    def put(self, embedded: Tensor, start: int) -> Tensor:
        """Embeddings [b * n, d] of the tokens from `start` on, with the rows: [b, n, d]."""
        where = self.where[:, start : start + len(embedded) // len(self.where)]
        plain = embedded.view(*where.shape, -1)
        return torch.where((where < 0).unsqueeze(-1), plain, self.values[where.clamp_min(0)])


def last_of_rows(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """hidden [b, n, d] -> [b, d] at each row's last token; at the first position for a row without tokens."""
    if len(set(counts)) == 1:
        return hidden[:, max(counts[0] - 1, 0)]
    index = on_device([max(c - 1, 0) for c in counts], hidden.device)
    return hidden[torch.arange(len(hidden), device=hidden.device), index]
