"""Decoding of one token a row as a CUDA graph: all kernels of a step are launched at once.

A graph repeats the same kernels on the same addresses. KV caches therefore have a fixed room, all of which
attention reads behind a mask, positions are counted on the device, and the states of Mamba-2 stay where they
are. On a CPU the same operations run one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_nemotron3.generate.batch import ForwardBatch
from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.moe import MixtureOfExperts
from megatron_nemotron3.generate.state import KVCache, MambaState, State

#: Steps before the capture, in which libraries choose and load their kernels.
WARM_UP = 2


class _Batch(ForwardBatch):
    """One token in each row, at positions that only the device knows."""

    def __init__(self, lengths: list[int], room: int, device: torch.device) -> None:
        super().__init__(lengths, 1, None, device)
        self.start, self.end = None, room
        self.positions = torch.tensor(lengths, device=device).unsqueeze(1)
        self.row_index = torch.arange(self.b, device=device).unsqueeze(1)

    def next_step(self) -> None:
        """Forget the mask of the last step, and move on by one position."""
        assert self.positions is not None
        self._mask = None
        self.positions.add_(1)


class GraphedStep:
    """Adds one token to every row of a state, with a CUDA graph.

    Args:
        state: belongs to this object from here on; no other pass may change it.
        room: tokens a row may have in all. KV caches get memory for them.

    Raises:
        ValueError: so many rows that the experts' products need a host synchronization (`moe`), which a graph
            cannot contain; or room for fewer tokens than a row has.
    """

    @torch.inference_mode()
    def __init__(self, engine: Engine, state: State, room: int) -> None:
        if room < max(state.lengths):
            raise ValueError(f"room={room}, but a row has {max(state.lengths)} tokens")
        for layer in engine.weights.layers:
            if isinstance(layer, MixtureOfExperts) and layer.needs_counts(state.batch, engine.device.type):
                raise ValueError(
                    f"{state.batch} rows at once sort tokens by expert, which waits for the host: use fewer "
                    "rows, or graphs=False"
                )
        self.engine, self.state, self.room = engine, state, room
        for kept in state.layers:
            if isinstance(kept, KVCache):
                kept.reserve(room)
        self._batch = _Batch(state.lengths, room, engine.device)
        self._tokens = torch.zeros(state.batch, dtype=torch.int64, device=engine.device)
        #: The states of Mamba-2, at addresses that stay.
        self._mamba = [
            (kept, kept.window.clone(), kept.ssm) for kept in state.layers if isinstance(kept, MambaState)
        ]
        self._graph = self._capture() if engine.device.type == "cuda" else None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [b, vocabulary] after tokens [b, 1]; they are overwritten by the next call.

        Raises:
            ValueError: there is no room for another token.
        """
        if max(self.state.lengths) >= self.room:
            raise ValueError(f"a row has {max(self.state.lengths)} tokens already, room={self.room}")
        self._tokens.copy_(tokens.view(-1))
        if self._graph is None:
            self._logits = self._run()
        else:
            self._graph.replay()
        self.state.lengths = [length + 1 for length in self.state.lengths]
        return self._logits

    def _run(self) -> Tensor:
        weights, batch = self.engine.weights, self._batch
        for kept, window, ssm in self._mamba:
            kept.set(window, ssm)
        x = weights.embedding.index_select(0, self._tokens)
        for layer, state in zip(weights.layers, self.state.layers):
            x, _ = layer(x, state, batch)
        for kept, window, _ in self._mamba:
            window.copy_(kept.window)
            kept.set(window, kept.ssm)
        batch.next_step()
        return self.engine.logits(weights.final_norm(x))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Run a few steps, undo them, and record one."""
        assert self._batch.positions is not None
        changed = [self._batch.positions, *(t for _, window, ssm in self._mamba for t in (window, ssm))]
        before = [tensor.clone() for tensor in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run()
                for tensor, old in zip(changed, before):
                    tensor.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._run()
        return graph
