"""Speculative decoding as a CUDA graph: draft, verify, accept and roll back without the host.

A step always drafts the same number of tokens and passes over all of them. How many are kept is a tensor: it
moves the lengths, selects the hidden states that wait for the next token, and gives the states of Mamba-2.
What lies behind a row's length in a KV cache is written again before it is read. The host reads one small
tensor a step, the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.graphs import StaticStack, check_room, check_rows, replayed
from megatron_nemotron3.generate.mtp import MTP
from megatron_nemotron3.generate.sampling import Sampling, accept, accept_greedy, draw, probabilities
from megatron_nemotron3.generate.state import State


class GraphedDrafts:
    """Adds 1 to `draft` + 1 tokens to every row, with a CUDA graph.

    Args:
        state, mtp: have seen the same tokens, at least `draft` in every row. They belong to this object from
            here on; no other pass may change them.
        newest: [b], which the states have not seen yet.
        room: tokens a row may have in all. A step needs room for `draft` + 1 more.

    Raises:
        ValueError: too many rows (`graphs.check_rows`), room for fewer tokens than a row has, or a row with
            fewer than `draft` tokens.
    """

    @torch.inference_mode()
    def __init__(
        self, engine: Engine, state: State, mtp: MTP, newest: Tensor, sampling: Sampling, room: int
    ) -> None:
        weights, self.draft = engine.weights, len(mtp.depths)
        check_room(state.lengths, room, 0)
        if min(state.lengths) < self.draft:
            raise ValueError(f"a row has {min(state.lengths)} tokens, but {self.draft} depths wait for it")
        b = state.batch
        tokens = b * (self.draft + 1)
        check_rows(engine, [*weights.layers, *(x for block in mtp.blocks for x in block.layers)], tokens)
        self.engine, self.state, self.mtp, self.sampling, self.room = engine, state, mtp, sampling, room
        self._model = StaticStack(weights.layers, weights.final_norm, state, room)
        self._depths = [
            StaticStack(block.layers, block.final_norm, depth, room)
            for block, depth in zip(mtp.blocks, mtp.depths, strict=True)
        ]
        device = engine.device
        self._newest = newest.clone()
        self._lengths = torch.tensor(state.lengths, device=device)
        self._rows = torch.arange(b, device=device)
        self._limits, self._known_limits = torch.full((b,), self.draft, device=device), [self.draft] * b
        self._numbers = torch.zeros(b, 2 * self.draft + 1, dtype=torch.float64, device=device)
        mtp.pending = [pending.clone() for pending in mtp.pending]
        changed = [self._newest, self._lengths, *mtp.pending]
        for stack in (self._model, *self._depths):
            changed += stack.changed
        self._replay = replayed(self._run, changed, device)

    @torch.inference_mode()
    def __call__(self, limits: Sequence[int], numbers: Tensor | None) -> list[list[int]]:
        """Add tokens to every row.

        Args:
            limits: drafts that may be accepted in each row, 0 to `draft`.
            numbers: [b, 2 * draft + 1] in [0, 1) on the host, unless sampling is greedy: to draft, to accept,
                and for the model's own token.

        Returns:
            The new tokens of each row; the last one is now the newest.

        Raises:
            ValueError: there is no room for `draft` + 1 more tokens.
        """
        check_room(self.state.lengths, self.room, self.draft + 1)
        if self._known_limits != list(limits):
            self._known_limits = list(limits)
            _upload(self._limits, torch.tensor(self._known_limits))
        if numbers is not None:
            _upload(self._numbers, numbers)
        self._replay()
        rows = self._found.tolist()
        self.mtp.lengths = self.state.lengths = [
            length + row[-1] + 1 for length, row in zip(self.state.lengths, rows)
        ]
        for number, depth in enumerate(self.mtp.depths, 1):
            depth.lengths = [length - number for length in self.state.lengths]
        return [[*row[: row[-1]], row[-2]] for row in rows]

    @property
    def newest(self) -> Tensor:
        """[b], a copy."""
        return self._newest.clone()

    def _run(self) -> None:
        """The whole step. `_found` [b, draft + 2]: drafts, own token, number of accepted drafts."""
        engine, k, n = self.engine, self.draft, self.draft + 1
        tokens, q = self._draft()
        embedded = engine.weights.embedding.index_select(0, tokens.flatten())
        hidden, records = self._model.run(embedded, self._lengths, n)
        logits, drafted = engine.logits(hidden), tokens[:, 1:]
        if self.sampling.greedy:
            accepted, own = accept_greedy(logits, drafted, self._limits)
        else:
            p, to_accept = probabilities(logits, self.sampling), self._numbers[:, k : 2 * k]
            accepted, own = accept(
                p, torch.stack(q, 1), drafted, self._limits, to_accept, self._numbers[:, -1]
            )
        kept = accepted + 1
        self._model.keep(records, kept)
        for depth, stack in enumerate(self._depths, 1):
            hidden = torch.cat((self.mtp.pending[depth - 1].unsqueeze(1), hidden), 1)
            self.mtp.pending[depth - 1].copy_(hidden[self._rows, kept])
            x = self.mtp.blocks[depth - 1].project(embedded, hidden[:, :n].flatten(0, 1))
            hidden, records = stack.run(x, self._lengths - depth, n)
            stack.keep(records, kept)
        self._lengths.add_(kept)
        self._newest.copy_(own)
        self._found = torch.cat((drafted, own.unsqueeze(1), accepted.unsqueeze(1)), 1)

    def _draft(self) -> tuple[Tensor, list[Tensor]]:
        """The newest tokens and the drafts after them [b, draft + 1], and what the drafts are drawn from."""
        engine = self.engine
        tokens, q = self._newest.unsqueeze(1), []
        hidden = self.mtp.pending[0].unsqueeze(1)
        for depth, (block, stack) in enumerate(zip(self.mtp.blocks, self._depths, strict=True), 1):
            if depth > 1:
                hidden = torch.cat((self.mtp.pending[depth - 1].unsqueeze(1), hidden), 1)
            embedded = engine.weights.embedding.index_select(0, tokens.flatten())
            x = block.project(embedded, hidden.flatten(0, 1))
            hidden, _ = stack.run(x, self._lengths - depth, depth)
            logits = engine.logits(hidden[:, -1])
            if self.sampling.greedy:
                chosen = logits.argmax(-1)
            else:
                q.append(probabilities(logits, self.sampling))
                chosen = draw(q[-1], self._numbers[:, depth - 1])
            tokens = torch.cat((tokens, chosen.unsqueeze(1)), 1)
        return tokens, q


def _upload(target: Tensor, values: Tensor) -> None:
    """Copy from the host to a tensor of the device, without waiting."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
