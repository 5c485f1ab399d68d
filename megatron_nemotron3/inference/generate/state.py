"""What a model keeps of its sequences.

A KV cache grows with the sequence, by 2 * groups * head dimension elements per token and attention layer.
A Mamba-2 layer keeps [kernel - 1, channels] and [heads, head dimension, state] elements at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_nemotron3.inference.generate.attention import KVCache
from megatron_nemotron3.inference.generate.scan import MambaPass, MambaState


@dataclass(frozen=True)
class Rollback:
    """What `DecodeState.truncate` needs to undo a pass, or the end of it.

    lengths: of the rows before the pass; counts: tokens of each row in it.
    scans: of each Mamba-2 layer.
    """

    lengths: list[int]
    counts: list[int]
    scans: dict[str, MambaPass]


class DecodeState:
    """States of the layers of a stack by name, and the tokens that each row has seen."""

    def __init__(self, lengths: list[int], layers: dict[str, KVCache | MambaState]) -> None:
        self.lengths, self.layers = lengths, layers

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def truncate(self, keep: int | Sequence[int], rollback: Rollback) -> None:
        """Roll the last pass back so that each row keeps the first `keep` of its tokens."""
        kept = [keep] * self.batch if isinstance(keep, int) else list(keep)
        if len(kept) != self.batch or not all(0 <= k <= c for k, c in zip(kept, rollback.counts)):
            raise ValueError(
                f"cannot keep {kept} tokens of a pass with {rollback.counts}: give one number per row, from "
                "0 to its tokens"
            )
        if self.lengths != [a + c for a, c in zip(rollback.lengths, rollback.counts)]:
            raise ValueError(
                f"the state has lengths {self.lengths}, but the pass added {rollback.counts} tokens to "
                f"{rollback.lengths}: give the rollback of the last pass"
            )
        if kept == rollback.counts:
            return
        for name, layer in self.layers.items():
            if isinstance(layer, MambaState):
                layer.set_lazily(rollback.scans[name], kept)
        self.lengths = [a + k for a, k in zip(rollback.lengths, kept)]

    def select(self, rows: Sequence[int]) -> DecodeState:
        """Return a copy of some rows, in the given order; a row may occur several times."""
        layers = {name: layer.select(list(rows)) for name, layer in self.layers.items()}
        return DecodeState([self.lengths[row] for row in rows], layers)

    def copy(self) -> DecodeState:
        return self.select(range(self.batch))
