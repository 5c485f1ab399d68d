"""What a sequence leaves behind: keys and values of attention layers, windows and states of Mamba-2 layers.

Keys and values grow with the sequence, 2 * groups * head dimension elements a token and attention layer.
A Mamba-2 layer has [channels, kernel - 1] and [heads, head dimension, state] elements, however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nemotron3.generate.scan import MambaTape


class KeyValues:
    """Keys and values of one attention layer.

    Attributes:
        cache: [b, 2, groups, capacity, head dimension]; places from a row's length on hold anything.
    """

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache

    def reserve(self, places: int) -> Tensor:
        """The cache with room for that many places; the capacity grows by doubling."""
        capacity = self.cache.shape[3]
        if places > capacity:
            while capacity < places:
                capacity = max(64, 2 * capacity)
            old = self.cache
            self.cache = old.new_empty(*old.shape[:3], capacity, old.shape[4])
            # What no row reads must still be finite: a score of -inf gives it weight 0, and 0 * nan is nan.
            self.cache[:, :, :, old.shape[3] :] = 0
            self.cache[:, :, :, : old.shape[3]] = old
        return self.cache

    def select(self, rows: Tensor) -> KeyValues:
        """A copy of some rows."""
        return KeyValues(self.cache.index_select(0, rows))


class MambaState:
    """State of one Mamba-2 layer.

    Attributes:
        window: [b, kernel - 1, channels], the last inputs of the convolution, oldest first.
        ssm: [b, heads, head dimension, state], FP32.
    """

    def __init__(self, window: Tensor, ssm: Tensor) -> None:
        self._window, self._ssm = window, ssm
        self._later: tuple[MambaTape, Sequence[int]] | None = None

    @property
    def window(self) -> Tensor:
        self._settle()
        return self._window

    @property
    def ssm(self) -> Tensor:
        self._settle()
        return self._ssm

    def set(self, window: Tensor, ssm: Tensor) -> None:
        """New tensors."""
        self._window, self._ssm, self._later = window, ssm, None

    def set_later(self, tape: MambaTape, kept: Sequence[int]) -> None:
        """The state after each row's first `kept` tokens of a pass, computed when it is asked for.

        After drafted tokens it is known only then how many stay: no state is computed twice.
        """
        self._later = tape, kept

    def select(self, rows: Tensor) -> MambaState:
        """A copy of some rows."""
        return MambaState(self.window.index_select(0, rows), self.ssm.index_select(0, rows))

    def _settle(self) -> None:
        if self._later is not None:
            tape, kept = self._later
            self.set(*tape.after(kept))


LayerState = KeyValues | MambaState | None


@dataclass(frozen=True)
class Tape:
    """What `State.truncate` needs to go back into a pass.

    Attributes:
        lengths: of the rows before it.
        counts: tokens of each row in it.
        layers: one for each layer, None where nothing is needed.
    """

    lengths: list[int]
    counts: list[int]
    layers: list[MambaTape | None]


class State:
    """All layers of a stack, for b sequences.

    Attributes:
        lengths: tokens that each row has seen.
        layers: one for each layer; None for kinds that keep nothing.
    """

    def __init__(self, lengths: list[int], layers: list[LayerState]) -> None:
        self.lengths, self.layers = lengths, layers

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, with reserved places."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in _tensors(layer))

    def truncate(self, keep: int | Sequence[int], tape: Tape) -> None:
        """Go back into the last pass: each row keeps the first `keep` of its tokens.

        Args:
            keep: tokens of the pass, one number for all rows or one a row; 0 undoes the pass.
            tape: what the pass returned. Nothing may have been added since.

        Raises:
            ValueError: a row had fewer tokens in the pass, or the tape is of another pass.
        """
        kept = [keep] * self.batch if isinstance(keep, int) else list(keep)
        if len(kept) != self.batch or not all(0 <= k <= c for k, c in zip(kept, tape.counts)):
            raise ValueError(
                f"cannot keep {kept} tokens of a pass with {tape.counts}: one number a row, 0 to its tokens"
            )
        if self.lengths != [a + c for a, c in zip(tape.lengths, tape.counts)]:
            raise ValueError(
                f"the state has lengths {self.lengths}, but the pass led from {tape.lengths} by "
                f"{tape.counts}: give the tape of the last pass"
            )
        if kept == tape.counts:
            return
        for layer, record in zip(self.layers, tape.layers, strict=True):
            if isinstance(layer, MambaState):
                assert record is not None
                layer.set_later(record, kept)
        self.lengths = [a + k for a, k in zip(tape.lengths, kept)]

    def select(self, rows: Sequence[int]) -> State:
        """A copy of some rows, in that order; a row may occur several times."""
        index = None
        layers: list[LayerState] = []
        for layer in self.layers:
            if layer is not None and index is None:
                index = torch.tensor(list(rows), device=next(iter(_tensors(layer))).device)
            layers.append(None if layer is None or index is None else layer.select(index))
        return State([self.lengths[row] for row in rows], layers)

    def copy(self) -> State:
        """A snapshot."""
        return self.select(range(self.batch))


def _tensors(layer: LayerState) -> tuple[Tensor, ...]:
    if layer is None:
        return ()
    return (layer.cache,) if isinstance(layer, KeyValues) else (layer.window, layer.ssm)
