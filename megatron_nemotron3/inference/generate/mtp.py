"""Multi-token prediction during decoding: the MTP block with a state of its own at every depth.

    depth k, position i:   h_k[i] = block(embedding of token i + k, h_{k-1}[i])  ->  logits of token i + k + 1

With s tokens known, depth k has been computed at positions 0 ... s - k - 1, and exactly one more h_{k-1},
that of position s - k, waits for token s: it is `MTP.pending`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_nemotron3.inference.generate.batch import MAX_ROLLBACK, last_of_rows, on_device
from megatron_nemotron3.inference.generate.decode import DecodeState, Rollback
from megatron_nemotron3.inference.generate.engine import CAPACITY, Engine, Output

#: Most tokens of a row that `MTP.append` leaves to the next draft.
KEPT_TOKENS = 8


class MTP:
    """The MTP block of an engine's model over b sequences, at depths 1 to `depths`.

    A step of decoding appends a few tokens and drafts after them. Both run the same depths, so `append` only
    keeps few tokens, and `draft` runs them with its own: one pass per depth. What depth 1 computes for the
    newest token stays on a CPU, if the next `append` begins with that token. Reading `depths` or `pending`
    finishes what is kept.

    Args:
        depths: default: as many as in training.
        capacity: as for `Engine.new_state`.

    Attributes:
        lengths: s, the tokens that each row has seen.

    Raises:
        ValueError: the model has no MTP weights, or no block for some depth.
    """

    def __init__(
        self, engine: Engine, batch: int = 1, depths: int | None = None, capacity: int = CAPACITY
    ) -> None:
        self.engine, model, blocks = engine, engine.model, engine.model.blocks
        stacks = [blocks[min(depth, len(blocks) - 1)][1] for depth in range(_checked_depths(engine, depths))]
        self._depths = [model.new_state(stack, batch, capacity) for stack in stacks]
        empty = torch.zeros(batch, engine.config.hidden_size, dtype=model.dtype, device=model.device)
        self._pending = [empty for _ in stacks]
        self.lengths = [0] * batch
        self._kept: _Tokens | None = None
        self._drafted: _Draft | None = None
        #: Whether depth 1 has seen the first of the kept tokens: then all depths are one position ahead.
        self._ahead = False

    @property
    def depths(self) -> list[DecodeState]:
        """The states of the block's layers at each depth."""
        self._finish()
        return self._depths

    @property
    def pending(self) -> list[Tensor]:
        """For each depth k, h_{k-1} [b, d] of position s - k; undefined in rows with s < k."""
        self._finish()
        return self._pending

    def select(self, rows: Sequence[int]) -> MTP:
        self._finish()
        result = copy.copy(self)
        result._depths = [depth.select(rows) for depth in self._depths]
        result._pending = [h[list(rows)] for h in self._pending]
        result.lengths = [self.lengths[row] for row in rows]
        return result

    @torch.inference_mode()
    def forward(
        self,
        depth: int,
        hidden: Tensor,
        next_tokens: Tensor,
        *,
        counts: Sequence[int] | None = None,
        rollback: bool = False,
    ) -> Output:
        """Apply the block to n positions of one depth, and advance the state of that depth.

        Args:
            depth: k, from 1.
            hidden: h_{k-1} [b, n, d] of the positions: from the decoder (k = 1) or from depth k - 1.
            next_tokens: [b, n], for position i token i + k.
            counts, rollback: as for `Engine.forward`; the rollback is for `self.depths[depth - 1].truncate`.

        Returns:
            h_k [b, n, d] after the block's final norm; its logits predict token i + k + 1.

        Raises:
            ValueError: there is no such depth; otherwise as `Engine.forward`.
        """
        if not 1 <= depth <= len(self._depths):
            raise ValueError(
                f"depth {depth}: there are depths 1 to {len(self._depths)}: MTP(depths=...) makes more"
            )
        self._finish()
        return self._run(depth, hidden, next_tokens, counts, rollback)

    @torch.inference_mode()
    def append(self, tokens: Tensor, hidden: Tensor, counts: Sequence[int] | None = None) -> None:
        """Add tokens that are final: every depth advances as far as the tokens it needs are known.

        Args:
            tokens: [b, n], following those already seen.
            hidden: [b, n, d], of the decoder at those tokens.
            counts: as for `Engine.forward`.
        """
        b, n = tokens.shape
        found = [n] * b if counts is None else list(counts)
        if self._continues_draft(tokens, found):
            self._end_draft(more=1)
        self._finish()
        self._kept = _Tokens(tokens, hidden, found)
        self.lengths = [a + c for a, c in zip(self.lengths, found)]
        if n > KEPT_TOKENS:
            self._finish()

    @torch.inference_mode()
    def draft(self, tokens: Tensor, choose: Callable[[Tensor], Tensor], count: int | None = None) -> Tensor:
        """Draft tokens; depth k gives the k-th. The states are left as they were.

        Args:
            tokens: [b], the newest token of each row, which has not been appended yet. At least one token
                must have been.
            choose: logits [b, vocabulary] -> tokens [b], called once per depth, in order.
            count: tokens to draft; default: one per depth.

        Returns:
            [b, count].

        Raises:
            ValueError: more tokens than depths, or a row without tokens.
        """
        count = len(self._depths) if count is None else count
        if not 1 <= count <= len(self._depths) or min(self.lengths) < 1:
            raise ValueError(
                f"cannot draft {count} tokens after {self.lengths} with {len(self._depths)} depths: append "
                "the prompt first, and use MTP(depths=...) for more"
            )
        if self._drafted is not None or count < len(self._depths) or count > MAX_ROLLBACK - KEPT_TOKENS:
            self._finish()
        kept, seen = self._kept or self._no_tokens(), self._lengths_without_kept()
        hidden, sizes, ends = kept.hidden, kept.counts, kept.counts
        # The kept tokens, the newest token and the drafts, left-aligned in each row up to `ends`.
        known = torch.cat((kept.tokens, kept.tokens.new_zeros(len(tokens), count)), 1)
        passes: list[tuple[Tensor, Rollback]] = []
        drafted: list[Tensor] = []
        for depth in range(1, count + 1):
            _put(known, ends, drafted[-1] if drafted else tokens)
            ends = [end + 1 for end in ends]
            hidden, sizes = self._prepend_pending(depth, hidden, sizes, seen)
            hidden = hidden[:, : max(sizes)]
            # No depth follows the last one, so of its output only what gives the draft is needed.
            followed = _last_tokens(known, ends, sizes)
            out = self._run(depth, hidden, followed, sizes, rollback=True, last=depth == count)
            assert out.rollback is not None
            passes.append((hidden, out.rollback))
            hidden = out.hidden
            newest = hidden[:, 0] if depth == count else last_of_rows(hidden, sizes)
            drafted.append(choose(self.engine.logits(newest)))
        self._kept, self._drafted = None, _Draft(tokens, passes)
        return torch.stack(drafted, 1)

    def _run(
        self,
        depth: int,
        hidden: Tensor,
        tokens: Tensor,
        counts: Sequence[int] | None,
        rollback: bool = False,
        last: bool = False,
    ) -> Output:
        engine, state = self.engine, self._depths[depth - 1]
        run = engine.new_run(tokens, state, counts, rollback, last)
        embedded = engine.model.embed(tokens).flatten(0, 1)
        return engine.finish(engine.model.mtp(depth, embedded, hidden.flatten(0, 1), run), state, run)

    @torch.inference_mode()
    def _finish(self) -> None:
        """Undo a draft and run the kept tokens: then the states are those of `lengths` tokens."""
        if self._drafted is not None:
            self._end_draft(more=0)
        if self._kept is None:
            return
        seen, kept = self._lengths_without_kept(), self._kept
        hidden, sizes = kept.hidden, kept.counts
        for depth in range(1, len(self._depths) + 1):
            hidden, sizes = self._prepend_pending(depth, hidden, sizes, seen)
            self._pending[depth - 1] = last_of_rows(hidden, sizes).clone()
            # The last one of each row waits for a token that is not known yet.
            sizes = [max(size - 1, 0) for size in sizes]
            hidden = hidden[:, : max(sizes)]
            if max(sizes):
                known = _last_tokens(kept.tokens, kept.counts, sizes)
                hidden = self._run(depth, hidden, known, sizes, last=depth == len(self._depths)).hidden
        self._kept, self._ahead = None, False

    def _end_draft(self, more: int) -> None:
        """Keep of a draft what its kept tokens give, and `more` = 1: what the newest token gives."""
        assert self._drafted is not None
        for depth, (hidden, rollback) in enumerate(self._drafted.passes, 1):
            # All depths reached the position before the newest token; without drafts depth k is k behind.
            keep = [max(count - depth + more, 0) for count in rollback.counts]
            self._depths[depth - 1].truncate(keep, rollback)
            # The first input after the kept ones is pending; with the newest token depth 1 has none.
            if depth > more:
                self._pending[depth - 1] = last_of_rows(hidden, [k + 1 for k in keep])
        self._drafted, self._ahead = None, more == 1

    def _continues_draft(self, tokens: Tensor, counts: Sequence[int]) -> bool:
        """Whether tokens [b, n] begin with those that were drafted after, at every depth."""
        drafted = self._drafted
        if drafted is None or len(drafted.passes) < len(self._depths) or min(counts) == 0:
            return False
        # On another device the host would wait for the comparison.
        return tokens.device.type == "cpu" and torch.equal(tokens[:, 0], drafted.newest)

    def _lengths_without_kept(self) -> list[int]:
        if self._kept is None:
            return self.lengths
        return [a - c for a, c in zip(self.lengths, self._kept.counts)]

    def _no_tokens(self) -> _Tokens:
        b = len(self.lengths)
        hidden = self._pending[0][:, None][:, :0]
        return _Tokens(torch.empty(b, 0, dtype=torch.long, device=hidden.device), hidden, [0] * b)

    def _prepend_pending(
        self, depth: int, hidden: Tensor, sizes: Sequence[int], seen: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Put the pending hidden state of a depth, in the rows that have one, before hidden [b, n, d]."""
        pending, first = self._pending[depth - 1], depth - self._ahead
        waiting = [length >= first > 0 for length in seen]
        if all(waiting):
            return torch.cat((pending.unsqueeze(1), hidden), 1), [size + 1 for size in sizes]
        if not any(waiting):
            # At least one position, so that a pending hidden state can be taken from it.
            return (hidden if hidden.shape[1] else pending.unsqueeze(1)), list(sizes)
        rows = [
            torch.cat((pending[row : row + 1], hidden[row])) if waits else hidden[row]
            for row, waits in enumerate(waiting)
        ]
        return pad_sequence(rows, batch_first=True), [size + waits for size, waits in zip(sizes, waiting)]


@dataclass(frozen=True)
class _Tokens:
    """Tokens [b, n] with the decoder's hidden states [b, n, d]; a row has `counts` of them."""

    tokens: Tensor
    hidden: Tensor
    counts: list[int]


@dataclass(frozen=True)
class _Draft:
    """What was drafted after the newest tokens [b]; the states still contain it."""

    newest: Tensor
    passes: list[tuple[Tensor, Rollback]]  # of each depth, its inputs [b, n, d]


def _checked_depths(engine: Engine, depths: int | None) -> int:
    config, blocks = engine.config, engine.model.blocks
    if not blocks:
        raise ValueError(f"{config.name} has no MTP block loaded: its checkpoint lacks one, or mtp=False")
    depths = config.mtp_num_layers if depths is None else depths
    if depths < 1:
        raise ValueError(f"depths={depths}: use 1 or more")
    if depths > len(blocks) and not config.mtp_use_repeated_layer:
        raise ValueError(f"depths={depths}, but {config.name} has {len(blocks)} MTP blocks")
    return depths


def _put(tokens: Tensor, places: Sequence[int], new: Tensor) -> None:
    """Put a token into each row of tokens [b, n]."""
    if len(set(places)) == 1:
        tokens[:, places[0]] = new
    else:
        tokens.scatter_(1, on_device(places, new.device).unsqueeze(1), new.unsqueeze(1))


def _last_tokens(tokens: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The last `sizes` of each row's `counts` tokens [b, n] -> [b, max(sizes)], left-aligned."""
    width = max(sizes)
    if len(set(counts)) == 1 and len(set(sizes)) == 1:
        return tokens[:, counts[0] - width : counts[0]]
    first = on_device([c - s for c, s in zip(counts, sizes)], tokens.device).unsqueeze(1)
    positions = first + torch.arange(width, device=tokens.device)
    return tokens.gather(1, positions.clamp_max_(tokens.shape[1] - 1))
