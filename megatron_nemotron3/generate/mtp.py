"""Multi-token prediction during decoding: the MTP block with a state of its own at every depth.

    depth k, position i:   h_k[i] = block(embedding of token i + k, h_{k-1}[i])  ->  logits of token i + k + 1

At depth k the block's attention sees the inputs of depth k at earlier positions, as in training. With s
tokens known, depth k has been computed at positions 0 ... s - k - 1, and exactly one more h_{k-1}, that of
position s - k, waits for token s: it is `MTP.pending`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_nemotron3.generate.batch import on_device
from megatron_nemotron3.generate.engine import CAPACITY, Engine, Output, last_of_rows
from megatron_nemotron3.generate.weights import MTPBlock


class MTP:
    """The MTP block of an engine's model over b sequences, at depths 1 to `depths`.

    Args:
        depths: default: as many as in training.
        capacity: as for `Engine.new_state`.

    Attributes:
        blocks: the block of each depth; with `mtp_use_repeated_layer` the same one.
        depths: `State` of its layers at each depth.
        pending: for each depth k, h_{k-1} [b, d] of position s - k; undefined in rows with s < k.
        lengths: s, the tokens that each row has seen.

    Raises:
        ValueError: the model has no MTP weights, or no block for some depth.
    """

    def __init__(
        self, engine: Engine, batch: int = 1, depths: int | None = None, capacity: int = CAPACITY
    ) -> None:
        self.engine, self.blocks = engine, _blocks_by_depth(engine, depths)
        self.depths = [engine.new_state(batch, capacity, block.layers) for block in self.blocks]
        hidden_size = engine.config.hidden_size
        self.pending = [engine.weights.embedding.new_zeros(batch, hidden_size) for _ in self.blocks]
        self.lengths = [0] * batch

    def select(self, rows: Sequence[int]) -> MTP:
        """Return a copy of some rows."""
        result = copy.copy(self)
        result.depths = [depth.select(rows) for depth in self.depths]
        result.pending = [h[list(rows)] for h in self.pending]
        result.lengths = [self.lengths[row] for row in rows]
        return result

    def copy(self) -> MTP:
        """Return an independent snapshot."""
        return self.select(range(len(self.lengths)))

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
        if not 1 <= depth <= len(self.depths):
            raise ValueError(
                f"depth {depth}: there are depths 1 to {len(self.depths)}: MTP(depths=...) makes more"
            )
        block, state = self.blocks[depth - 1], self.depths[depth - 1]
        batch = self.engine.new_batch(next_tokens, state, counts, rollback)
        embedded = self.engine.weights.embedding.index_select(0, next_tokens.reshape(-1))
        x = block.project(embedded, hidden.flatten(0, 1))
        return self.engine.run_layers(block.layers, block.final_norm, x, state, batch)

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
        sizes = found
        for depth in range(1, len(self.depths) + 1):
            hidden, sizes = self._after_pending(depth, hidden, sizes)
            self.pending[depth - 1] = last_of_rows(hidden, sizes).clone()
            # The last one of each row waits for a token that is not known yet.
            sizes = [max(size - 1, 0) for size in sizes]
            hidden = hidden[:, : max(sizes)]
            if max(sizes):
                known = _last_tokens(tokens, found, sizes)
                hidden = self.forward(depth, hidden, known, counts=sizes).hidden
        self.lengths = [a + c for a, c in zip(self.lengths, found)]

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
        count = len(self.depths) if count is None else count
        if not 1 <= count <= len(self.depths) or min(self.lengths) < 1:
            raise ValueError(
                f"cannot draft {count} tokens after {self.lengths} with {len(self.depths)} depths: append "
                "the prompt first, and use MTP(depths=...) for more"
            )
        b = len(self.lengths)
        drafted, rollbacks = [tokens], []
        hidden, sizes = self.pending[0].unsqueeze(1), [1] * b
        for depth in range(1, count + 1):
            if depth > 1:
                hidden, sizes = self._after_pending(depth, hidden, sizes)
            known = _last_tokens(torch.stack(drafted, 1), [depth] * b, sizes)
            out = self.forward(depth, hidden, known, counts=sizes, rollback=True)
            assert out.rollback is not None
            rollbacks.append(out.rollback)
            hidden = out.hidden
            drafted.append(choose(self.engine.logits(last_of_rows(hidden, sizes))))
        for state, rollback in zip(self.depths, rollbacks):
            state.truncate(0, rollback)
        return torch.stack(drafted[1:], 1)

    def _after_pending(self, depth: int, hidden: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Put the pending hidden state of a depth, in the rows that have one, before hidden [b, n, d].

        Returns:
            The rows, left-aligned, and their sizes.
        """
        pending, waiting = self.pending[depth - 1], [length >= depth for length in self.lengths]
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


def _blocks_by_depth(engine: Engine, depths: int | None) -> list[MTPBlock]:
    config, blocks = engine.config, engine.weights.mtp
    if not blocks:
        raise ValueError(f"{config.name} has no MTP block loaded: its checkpoint lacks one, or mtp=False")
    depths = config.mtp_num_layers if depths is None else depths
    if depths < 1:
        raise ValueError(f"depths={depths}: use 1 or more")
    if config.mtp_use_repeated_layer:
        return blocks[:1] * depths
    if depths > len(blocks):
        raise ValueError(f"depths={depths}, but {config.name} has {len(blocks)} MTP blocks")
    return blocks[:depths]


def _last_tokens(tokens: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The last `sizes` of each row's `counts` tokens [b, n] -> [b, max(sizes)], left-aligned."""
    width = max(sizes)
    if len(set(counts)) == 1 and len(set(sizes)) == 1:
        return tokens[:, counts[0] - width : counts[0]]
    first = on_device([c - s for c, s in zip(counts, sizes)], tokens.device).unsqueeze(1)
    positions = first + torch.arange(width, device=tokens.device)
    return tokens.gather(1, positions.clamp_max_(tokens.shape[1] - 1))
