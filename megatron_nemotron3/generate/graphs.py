"""Decoding as a CUDA graph: all kernels of a step are launched at once.

A graph repeats the same kernels on the same addresses. KV caches therefore have a fixed room, all of which
attention reads behind a mask, lengths are counted on the device, and the states of Mamba-2 stay where they
are. On a CPU the same operations run one by one. `graphed_drafts` has the step with drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_nemotron3.generate.batch import ForwardBatch
from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.layers import Layer, Norm
from megatron_nemotron3.generate.moe import MixtureOfExperts
from megatron_nemotron3.generate.state import KVCache, MambaPass, MambaState, State

#: Room is a multiple of this, so that torch's attention kernels take the rows of a mask without a copy.
ALIGNMENT = 16
#: Steps before the capture, in which libraries choose and load their kernels.
WARM_UP = 2


class StaticBatch(ForwardBatch):
    """n tokens in each row, after lengths that only the device knows.

    Args:
        lengths: [b], tokens that each row has seen before.
        room: tokens a row may have in all, those of this pass included.
        rollback: whether the states after each of the n tokens are wanted.
    """

    def __init__(self, lengths: Tensor, n: int, room: int, rollback: bool) -> None:
        super().__init__([0] * len(lengths), n, None, lengths.device, rollback)
        self.start, self.end = None, room
        self.positions = lengths.unsqueeze(1) + torch.arange(n, device=lengths.device)
        self.row_index = torch.arange(self.b, device=lengths.device).unsqueeze(1)

    def mask_fits(self, queries: int) -> bool:
        """Masks are built from the device's lengths, whatever their size."""
        return True


class StaticStack:
    """A stack of layers over a state whose memory stays where it is.

    Args:
        state: belongs to this object from here on; no other pass may change it.
        room: tokens a row may have in all. KV caches get memory for them.
    """

    def __init__(self, layers: Sequence[Layer], final_norm: Norm, state: State, room: int) -> None:
        self._layers, self._final_norm, self._state = layers, final_norm, state
        self._room = room = -(-room // ALIGNMENT) * ALIGNMENT
        for kept in state.layers:
            if isinstance(kept, KVCache):
                kept.reserve(room)
        #: The states of Mamba-2, at addresses that stay.
        self._mamba = [
            (kept, kept.window.clone(), kept.ssm.clone())
            for kept in state.layers
            if isinstance(kept, MambaState)
        ]
        self._put_back()

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes and the next one reads; positions of KV caches are written again instead."""
        return [tensor for _, window, ssm in self._mamba for tensor in (window, ssm)]

    def run(
        self, x: Tensor, lengths: Tensor, n: int, rollback: bool = True
    ) -> tuple[Tensor, list[MambaPass | None]]:
        """Run x [b * n, d] after `lengths` [b] tokens.

        With `rollback` the states stay as they were, until `keep`; otherwise n must be 1.

        Returns:
            [b, n, d] after the final norm, and what `keep` needs.
        """
        batch, records = StaticBatch(lengths, n, self._room, rollback), []
        for layer, state in zip(self._layers, self._state.layers):
            x, record = layer(x, state, batch)
            records.append(record)
        for kept, window, _ in () if rollback else self._mamba:
            window.copy_(kept.window)
        self._put_back()
        return self._final_norm(x).view(batch.b, n, -1), records

    def keep(self, records: Sequence[MambaPass | None], counts: Tensor) -> None:
        """Make the states those after each row's first `counts` [b] tokens of a pass."""
        made = [record for record in records if record is not None]
        for (_, window, ssm), record in zip(self._mamba, made, strict=True):
            for target, value in zip((window, ssm), record.after_counts(counts)):
                target.copy_(value)

    def _put_back(self) -> None:
        for kept, window, ssm in self._mamba:
            kept.set(window, ssm)


def check_rows(engine: Engine, layers: Sequence[Layer], tokens: int) -> None:
    """Refuse a graph of passes over so many tokens, all rows together.

    Raises:
        ValueError: the experts' products need a host synchronization (`moe`), which a graph cannot contain.
    """
    for layer in layers:
        if isinstance(layer, MixtureOfExperts) and layer.needs_counts(tokens, engine.device.type):
            raise ValueError(
                f"{tokens} tokens at once are sorted by expert, which waits for the host (no grouped product "
                "for this type and device): use fewer rows or drafts, or no CUDA graphs"
            )


def capture(run: Callable[[], None], changed: Sequence[Tensor]) -> Callable[[], None]:
    """Run a step a few times, undo that, record it as a CUDA graph, and return its replay.

    Args:
        run: launches the same kernels on the same memory each time; it does not wait for the device.
        changed: what it changes and reads again.
    """
    before = [tensor.clone() for tensor in changed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
            for tensor, old in zip(changed, before):
                tensor.copy_(old)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def replayed(run: Callable[[], None], changed: Sequence[Tensor], device: torch.device) -> Callable[[], None]:
    """`capture` on a GPU; on a CPU the step itself."""
    return capture(run, changed) if device.type == "cuda" else run


def check_room(lengths: Sequence[int], room: int, more: int) -> None:
    """Raise ValueError unless `more` tokens after each row's `lengths` have room."""
    if max(lengths) + more > room:
        raise ValueError(f"a row has {max(lengths)} tokens, and room={room}: {more} more do not fit")


class GraphedStep:
    """Adds one token to every row of a state, with a CUDA graph.

    Args:
        state: belongs to this object from here on; no other pass may change it.
        room: tokens a row may have in all. KV caches get memory for them.

    Raises:
        ValueError: too many rows (`check_rows`), or room for fewer tokens than a row has.
    """

    @torch.inference_mode()
    def __init__(self, engine: Engine, state: State, room: int) -> None:
        weights = engine.weights
        check_room(state.lengths, room, 0)
        check_rows(engine, weights.layers, state.batch)
        self.engine, self.state, self.room = engine, state, room
        self._stack = StaticStack(weights.layers, weights.final_norm, state, room)
        self._lengths = torch.tensor(state.lengths, device=engine.device)
        self._tokens = torch.zeros(state.batch, dtype=torch.int64, device=engine.device)
        self._replay = replayed(self._run, [self._lengths, *self._stack.changed], engine.device)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [b, vocabulary] after tokens [b, 1]; they are overwritten by the next call.

        Raises:
            ValueError: there is no room for another token.
        """
        check_room(self.state.lengths, self.room, 1)
        self._tokens.copy_(tokens.view(-1))
        self._replay()
        self.state.lengths = [length + 1 for length in self.state.lengths]
        return self._logits

    def _run(self) -> None:
        x = self.engine.weights.embedding.index_select(0, self._tokens)
        hidden, _ = self._stack.run(x, self._lengths, 1, rollback=False)
        self._lengths.add_(1)
        self._logits = self.engine.logits(hidden.squeeze(1))
