"""A model that runs token by token: prefill in chunks, forward passes over a state, passes undone.

engine = Engine(load(folder))
state = engine.new_state()
last = engine.prefill([prompt], state)  # logits [1, vocabulary] after the prompt
out = engine.forward(tokens, state, keep=True)  # n drafted tokens [1, n] at once
state.truncate(m, out.tape)  # as if only m of them had been seen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nemotron3.generate.layers import Layer
from megatron_nemotron3.generate.mtp import MTPState, append, blocks, draft, enter
from megatron_nemotron3.generate.scan import MambaTape
from megatron_nemotron3.generate.span import Span
from megatron_nemotron3.generate.state import State, Tape
from megatron_nemotron3.generate.weights import Weights

#: Tokens of one pass of a prefill. Activations are in proportion to it, keys and values to the sequence.
CHUNK = 512
#: Rows of a cache at first.
CAPACITY = 256


@dataclass(frozen=True)
class Output:
    """What a pass over [b, n] tokens gives.

    Attributes:
        logits: [b, n, vocabulary]; of a prefill and with `logits="last"` [b, vocabulary]; None: not asked
            for.
        hidden: after the final norm, [b, n, d]; of a prefill [b, d] at each row's last token.
        tape: with `keep`: what `State.truncate` needs.
    """

    logits: Tensor | None
    hidden: Tensor
    tape: Tape | None = None


class Engine:
    """A model on one device.

    Args:
        weights: what `load` returns.
        max_context: tokens a sequence may have; default: the model's `max_position_embeddings`. No layer
            knows positions, so a longer context computes; whether it makes sense depends on the training.
    """

    def __init__(self, weights: Weights, *, max_context: int | None = None) -> None:
        self.weights, self.config = weights, weights.config
        self.device, self.dtype = weights.device, weights.dtype
        self.max_context = weights.config.max_position_embeddings if max_context is None else max_context

    def new_state(self, batch: int = 1, capacity: int = CAPACITY) -> State:
        """The state of `batch` empty sequences.

        Args:
            capacity: tokens a row that attention layers have room for at first; it doubles when needed.
        """
        return State([0] * batch, [layer.new_state(batch, capacity) for layer in self.weights.layers])

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        state: State,
        *,
        counts: Sequence[int] | None = None,
        keep: bool = False,
        logits: str = "all",
    ) -> Output:
        """Run n tokens a row behind what the state has seen; the state moves on.

        Args:
            tokens: [b, n] ids, which are not checked here.
            counts: tokens that each row has, if fewer than n; what stands behind them is padding, any valid
                ids. The row's result is the same as alone, and rows of the output behind it mean nothing.
            keep: also return the tape for `State.truncate`.
            logits: "all", "last" (each row's last token; a row without tokens: its first place), "none".

        Raises:
            ValueError: tokens that are not [b, n] with the state's b and n > 0, counts that do not fit, or
                a context beyond `max_context`.
        """
        span = self._span(tokens, state, counts, keep)
        x = self.weights.embedding.index_select(0, tokens.reshape(-1))
        x, tapes = run(self.weights.layers, x, state, span)
        hidden = self.weights.final_norm(x).view(span.b, span.n, -1)
        tape = Tape(state.lengths, span.counts, tapes) if keep else None
        state.lengths = [a + c for a, c in zip(state.lengths, span.counts)]
        if logits == "none":
            return Output(None, hidden, tape)
        if logits == "last":
            return Output(self.logits(self.last(hidden, span.counts)), hidden, tape)
        return Output(self.logits(hidden), hidden, tape)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        state: State,
        *,
        chunk: int = CHUNK,
        mtp: MTPState | None = None,
    ) -> Output:
        """Read prompts, some tokens at a time: activations do not grow with their length.

        Args:
            prompts: one for each row of the state, of any lengths; or [b, n] ids.
            chunk: tokens of one pass, > 0.
            mtp: also run the MTP block over the prompts, as far as the following tokens are known.

        Returns:
            Logits [b, vocabulary] and hidden [b, d] at the last token of each prompt.

        Raises:
            ValueError: another number of prompts than rows, an empty prompt, an id outside the vocabulary,
                a context beyond `max_context`.
        """
        rows = prompts.tolist() if isinstance(prompts, Tensor) else [list(prompt) for prompt in prompts]
        if len(rows) != state.batch:
            raise ValueError(f"{len(rows)} prompts for a state of {state.batch} rows: give one for each row")
        self.check(rows, state.lengths)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} tokens: use 1 or more")
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
        last = None
        for start in range(0, longest, chunk):
            tokens = padded[:, start : start + chunk]
            counts = [min(max(len(row) - start, 0), tokens.shape[1]) for row in rows]
            ragged = counts if min(counts) < tokens.shape[1] else None
            hidden = self.forward(tokens, state, counts=ragged, logits="none").hidden
            if mtp is not None:
                append(self, mtp, tokens, hidden, ragged)
            found = self.last(hidden, counts)
            if last is None:
                last = found.clone()
            else:
                some = torch.tensor([count > 0 for count in counts], device=self.device).unsqueeze(1)
                last = torch.where(some, found, last)
        assert last is not None
        return Output(self.logits(last), last)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d], after a final norm -> [..., vocabulary], in the dtype of the weights."""
        return hidden @ self.weights.output

    def last(self, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        """hidden [b, n, d] -> [b, d] at each row's last token; the first place where a row has none."""
        if len(set(counts)) == 1:
            return hidden[:, max(counts[0] - 1, 0)]
        index = torch.tensor([max(c - 1, 0) for c in counts], device=self.device)
        return hidden[torch.arange(len(hidden), device=self.device), index]

    def check(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int] = (), more: int = 0) -> None:
        """Refuse prompts that cannot be read behind `lengths` tokens with `more` to come; as `prefill`."""
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
            self._check_context(row, (lengths[row] if lengths else 0) + len(prompt) + more)

    def _check_context(self, row: int, context: int) -> None:
        if context > self.max_context:
            raise ValueError(
                f"row {row} would have {context:,} tokens, more than max_context={self.max_context:,}: "
                "shorten it, or raise max_context (no layer knows positions; the default is the model's "
                "max_position_embeddings)"
            )

    def _span(self, tokens: Tensor, state: State, counts: Sequence[int] | None, keep: bool) -> Span:
        if tokens.dim() != 2 or tokens.shape[0] != state.batch or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must be [b, n] with b={state.batch} as the state and n > 0"
            )
        span = Span(state.lengths, tokens.shape[1], counts, self.device, keep)
        if span.end > self.max_context:
            for row, (length, count) in enumerate(zip(state.lengths, span.counts)):
                self._check_context(row, length + count)
        return span

    # -- multi-token prediction --------------------------------------------------------------------

    def new_mtp_state(self, batch: int = 1, depths: int | None = None, capacity: int = CAPACITY) -> MTPState:
        """The state of the MTP block at depths 1 to `depths`; default: as many as in training.

        Raises:
            ValueError: the model has no MTP weights, or no block for some depth.
        """
        found = blocks(self.weights, depths)
        empty = [State([0] * batch, [x.new_state(batch, capacity) for x in b.layers]) for b in found]
        pending = self.weights.embedding.new_zeros(len(found), batch, self.config.hidden_size)
        return MTPState(found, empty, list(pending), [0] * batch)

    @torch.inference_mode()
    def mtp_forward(
        self,
        depth: int,
        hidden: Tensor,
        next_tokens: Tensor,
        state: MTPState,
        *,
        counts: Sequence[int] | None = None,
        keep: bool = False,
        logits: str = "all",
    ) -> Output:
        """One application of the MTP block: n positions of one depth.

        Args:
            depth: k, from 1.
            hidden: h_{k-1} [b, n, d] of the positions: of the decoder (k = 1) or of the depth before.
            next_tokens: [b, n], for position i token i + k.
            state: its depth k moves on by n positions.
            counts, keep, logits: as `forward`; the tape is for `state.depths[depth - 1].truncate`.

        Returns:
            h_k [b, n, d] after the block's final norm, and its logits: of token i + k + 1.

        Raises:
            ValueError: a depth the state does not have; otherwise as `forward`.
        """
        if not 1 <= depth <= len(state.depths):
            raise ValueError(
                f"depth {depth}: this state has the depths 1 to {len(state.depths)}: "
                "new_mtp_state(depths=...) makes more"
            )
        block, stack = state.blocks[depth - 1], state.depths[depth - 1]
        span = self._span(next_tokens, stack, counts, keep)
        embedded = self.weights.embedding.index_select(0, next_tokens.reshape(-1))
        x, tapes = run(block.layers, enter(block, embedded, hidden.flatten(0, 1)), stack, span)
        result = block.final_norm(x).view(span.b, span.n, -1)
        tape = Tape(stack.lengths, span.counts, tapes) if keep else None
        stack.lengths = [a + c for a, c in zip(stack.lengths, span.counts)]
        if logits == "none":
            return Output(None, result, tape)
        chosen = self.last(result, span.counts) if logits == "last" else result
        return Output(self.logits(chosen), result, tape)

    @torch.inference_mode()
    def mtp_append(
        self, state: MTPState, tokens: Tensor, hidden: Tensor, *, counts: Sequence[int] | None = None
    ) -> None:
        """Tokens that are certain: every depth moves on as far as the tokens it needs are known.

        Args:
            tokens: [b, n], behind those the state has seen.
            hidden: [b, n, d], of the decoder at those tokens.
            counts: as `forward`.
        """
        append(self, state, tokens, hidden, counts)

    @torch.inference_mode()
    def mtp_draft(
        self, state: MTPState, tokens: Tensor, choose: Callable[[Tensor], Tensor], count: int | None = None
    ) -> Tensor:
        """Draft tokens: depth k gives the k-th. The state is afterwards as it was.

        Args:
            state: has seen every token before `tokens`, at least one.
            tokens: [b], the newest token of each row, which the state has not seen.
            choose: logits [b, vocabulary] -> [b] tokens, called once a depth in order.
            count: tokens to draft; default: the depths of the state.

        Returns:
            [b, count].

        Raises:
            ValueError: more tokens than the state has depths, or a row that has seen nothing.
        """
        return draft(self, state, tokens, choose, len(state.depths) if count is None else count)


def run(layers: list[Layer], x: Tensor, state: State, span: Span) -> tuple[Tensor, list[MambaTape | None]]:
    """x [b * n, d] through a stack of layers; their states move on, the lengths of `state` do not."""
    tapes = []
    for layer, kept in zip(layers, state.layers):
        x, tape = layer(x, kept, span)
        tapes.append(tape)
    return x, tapes
