"""Multi-token prediction while decoding: the MTP block with a state of its own at every depth.

    depth k, position i:   h_k[i] = block(embedding of token i + k, h_{k-1}[i])  ->  logits of token i + k + 1

At depth k the block's attention sees the inputs of depth k at earlier positions, as in training. With s
tokens known, depth k has been computed at the positions 0 ... s - k - 1, and exactly one more h_{k-1}, that
of position s - k, waits for token s: it is `MTPState.pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_nemotron3.generate.state import State
from megatron_nemotron3.generate.weights import MTPBlock, Weights

if TYPE_CHECKING:
    from megatron_nemotron3.generate.engine import Engine


class MTPState:
    """What all depths keep of b sequences.

    Attributes:
        blocks: the block of each depth; with `mtp_use_repeated_layer` the same one.
        depths: `State` of its layers at each depth.
        pending: for each depth k h_{k-1} [b, d] of position s - k; meaningless in rows with s < k.
        lengths: s, the tokens that each row has seen.
    """

    def __init__(
        self, blocks: list[MTPBlock], depths: list[State], pending: list[Tensor], lengths: list[int]
    ) -> None:
        self.blocks, self.depths, self.pending, self.lengths = blocks, depths, pending, lengths

    def select(self, rows: Sequence[int]) -> MTPState:
        """A copy of some rows."""
        index = torch.tensor(list(rows), device=self.pending[0].device)
        return MTPState(
            self.blocks,
            [depth.select(rows) for depth in self.depths],
            [h.index_select(0, index) for h in self.pending],
            [self.lengths[row] for row in rows],
        )

    def copy(self) -> MTPState:
        """A snapshot."""
        return self.select(range(len(self.lengths)))

    @property
    def nbytes(self) -> int:
        """Bytes of all states, with reserved places."""
        return sum(depth.nbytes for depth in self.depths)


def blocks(weights: Weights, depths: int | None) -> list[MTPBlock]:
    """The block of each depth; default: of as many as in training.

    Raises:
        ValueError: no MTP weights, no depth, or more than there are blocks for.
    """
    config = weights.config
    if not weights.mtp:
        raise ValueError(f"{config.name} has no MTP block loaded: its checkpoint lacks one, or mtp=False")
    depths = config.mtp_num_layers if depths is None else depths
    if depths < 1:
        raise ValueError(f"depths={depths}: use 1 or more")
    if config.mtp_use_repeated_layer:
        return weights.mtp[:1] * depths
    if depths > len(weights.mtp):
        raise ValueError(f"depths={depths}, but {config.name} has {len(weights.mtp)} MTP blocks")
    return weights.mtp[:depths]


def enter(block: MTPBlock, embedded: Tensor, hidden: Tensor) -> Tensor:
    """Embeddings and h_{k-1}, both [tokens, d] -> what the block's layers get."""
    return torch.mm(torch.cat((block.enorm(embedded), block.hnorm(hidden)), 1), block.eh_proj)


def append(
    engine: Engine, state: MTPState, tokens: Tensor, hidden: Tensor, counts: Sequence[int] | None
) -> None:
    """See `Engine.mtp_append`."""
    b, n = tokens.shape
    found = [n] * b if counts is None else list(counts)
    inputs = found
    for depth in range(1, len(state.depths) + 1):
        waiting = [length >= depth for length in state.lengths]
        hidden, sizes = _join(state.pending[depth - 1], waiting, hidden, inputs)
        # The last one of each row waits for a token that is not known yet.
        steps = [max(size - 1, 0) for size in sizes]
        state.pending[depth - 1] = engine.last(hidden, sizes).clone()
        if not any(steps):
            hidden, inputs = hidden[:, :0], steps
            continue
        width = max(steps)
        tokens_, hidden = _last(tokens, found, steps, width), hidden[:, :width]
        ragged = steps if min(steps) < width else None
        hidden = engine.mtp_forward(depth, hidden, tokens_, state, counts=ragged, logits="none").hidden
        inputs = steps
    state.lengths = [a + c for a, c in zip(state.lengths, found)]


def draft(
    engine: Engine, state: MTPState, tokens: Tensor, choose: Callable[[Tensor], Tensor], count: int
) -> Tensor:
    """See `Engine.mtp_draft`."""
    if not 1 <= count <= len(state.depths) or min(state.lengths) < 1:
        raise ValueError(
            f"cannot draft {count} tokens behind {state.lengths} with {len(state.depths)} depths: append the "
            "prompt first, and use new_mtp_state(depths=...) for more"
        )
    b = len(state.lengths)
    drafted = [tokens]
    hidden, inputs = state.pending[0].unsqueeze(1), [1] * b
    tapes = []
    for depth in range(1, count + 1):
        if depth > 1:
            waiting = [length >= depth for length in state.lengths]
            hidden, inputs = _join(state.pending[depth - 1], waiting, hidden, inputs)
        width = max(inputs)
        known = _last(torch.stack(drafted, 1), [depth] * b, inputs, width)
        ragged = inputs if min(inputs) < width else None
        out = engine.mtp_forward(depth, hidden, known, state, counts=ragged, keep=True, logits="last")
        assert out.logits is not None and out.tape is not None
        tapes.append(out.tape)
        hidden = out.hidden
        drafted.append(choose(out.logits))
    for stack, tape in zip(state.depths, tapes):
        stack.truncate(0, tape)
    return torch.stack(drafted[1:], 1)


def _join(
    first: Tensor, waiting: Sequence[bool], rest: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """`first` [b, d] of the rows that have it, then `rest` [b, n, d] -> left-aligned, and sizes of rows."""
    if all(waiting):
        return torch.cat((first.unsqueeze(1), rest), 1), [size + 1 for size in sizes]
    if not any(waiting):
        # One place more than nothing, so that a pending hidden state can be taken from it.
        return (rest if rest.shape[1] else first.unsqueeze(1)), list(sizes)
    rows = [
        torch.cat((first[row : row + 1], rest[row])) if waits else rest[row]
        for row, waits in enumerate(waiting)
    ]
    return pad_sequence(rows, batch_first=True), [size + waits for size, waits in zip(sizes, waiting)]


def _last(tokens: Tensor, counts: Sequence[int], steps: Sequence[int], width: int) -> Tensor:
    """The last `steps` of each row's `counts` tokens [b, n] -> [b, width], left-aligned."""
    if len(set(counts)) == 1 and len(set(steps)) == 1:
        return tokens[:, counts[0] - width : counts[0]]
    first = torch.tensor([c - s for c, s in zip(counts, steps)], device=tokens.device).unsqueeze(1)
    places = first + torch.arange(width, device=tokens.device)
    return tokens.gather(1, places.clamp_max_(tokens.shape[1] - 1))
