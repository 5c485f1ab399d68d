"""The tokens of one forward pass: n positions for each of b rows, of which a row may use fewer.

Rows are left-aligned and padded at their end. Padding changes nothing: attention is causal, a Mamba-2 layer
gets a time step of zero for it, which is the identity, and the other layers treat each token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models.definition import Forward

#: Tokens of the longest pass that can be rolled back. The work of `scan.decay_table` grows with their cube.
MAX_ROLLBACK = 128
#: Elements of the largest attention mask that is built. Beyond it a CPU processes one row at a time with its
#: `ForwardBatch.reversed_mask`; a GPU, whose kernels need aligned mask rows, processes tiles of queries.
MASK_ELEMENTS = 2**22
#: Elements of the largest mask that is kept for later passes.
KEPT_MASK_ELEMENTS = 2**19


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of numbers of the host, copied without synchronizing."""
    return torch.tensor(values).to(device, non_blocking=True)


class ForwardBatch(Forward):
    """A forward pass over n positions in each of b rows.

    lengths: tokens each row has seen before.
    counts: tokens of each row; default: n.
    rollback: whether the states after each token must stay reachable (`decode.Rollback`).
    layers: states by layer, which the pass continues.
    scans: of a pass that can be rolled back, by layer.
    last: layers after the last one with a state run on each row's last token only, as does what follows.
    start: the length before, where all rows have the same; otherwise None.
    positions, row_index: [b, n] and [b, 1], to index a KV cache where lengths differ; otherwise None.
    valid: [b, n], False for padding; None without padding.
    single_token: one token in every row, and no rollback.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        n: int,
        counts: Sequence[int] | None,
        device: torch.device,
        rollback: bool = False,
        layers: dict[str, Any] | None = None,
    ) -> None:
        super().__init__([n], layers)
        if counts is not None and (len(counts) != len(lengths) or not all(0 <= c <= n for c in counts)):
            raise ValueError(
                f"counts {list(counts)} for {len(lengths)} rows: give one per row, from 0 to {n} tokens"
            )
        if rollback and n > MAX_ROLLBACK:
            raise ValueError(
                f"rollback=True with {n} tokens: a pass that can be rolled back has at most {MAX_ROLLBACK}"
            )
        self.b, self.n, self.rollback, self.device = len(lengths), n, rollback, device
        self.last, self.scans = False, dict[str, Any]()
        self.lengths = tuple(lengths)
        self.counts = [n] * self.b if counts is None else list(counts)
        #: Cache positions that the longest row fills, padding included.
        self.end = max(lengths) + n
        self.start = lengths[0] if min(lengths) == max(lengths) else None
        self.single_token = n == 1 and not rollback and min(self.counts) == 1
        self.positions: Tensor | None = None
        self.row_index: Tensor | None = None
        if self.start is None:
            self.positions = on_device(lengths, device).unsqueeze(1) + torch.arange(n, device=device)
            self.row_index = torch.arange(self.b, device=device).unsqueeze(1)
        self.valid: Tensor | None = None
        if min(self.counts) < n:
            used = on_device(self.counts, device).unsqueeze(1)
            self.valid = torch.arange(n, device=device) < used
        self._mask: tuple[tuple[int, int], Tensor] | None = None
        self._reversed: Tensor | None = None

    def newest(self, x: Tensor) -> Tensor:
        """x [b * n, d] -> [b, d] at each row's last token."""
        return last_of_rows(x.view(self.b, self.n, -1), self.counts)

    def mask_fits(self, queries: int) -> bool:
        """Whether the mask of all n positions stays below `MASK_ELEMENTS`; `queries` heads share a key."""
        return self.n * self._mask_row(queries) <= MASK_ELEMENTS

    def _mask_row(self, queries: int) -> int:
        return (1 if self.start is not None else self.b) * queries * self.end

    def reversed_mask(self, row: int, dtype: torch.dtype) -> Tensor:
        """The mask of one row's n queries in reverse order, in n + `end` elements instead of n * `end`.

        Query n - 1 - i must not see the last i keys, so each mask row is the one before it, shifted by one:
        overlapping windows of a single vector.
        """
        if self._reversed is None or self._reversed.dtype != dtype:
            self._reversed = torch.zeros(self.end + self.n - 1, dtype=dtype, device=self.device)
            self._reversed[self.end :] = -torch.inf
        end = self.lengths[row] + self.n
        return self._reversed.as_strided((self.n, end), (1, 1), self.end - end)

    def query_tiles(self, queries: int) -> list[tuple[int, int]]:
        """Ranges of the n positions whose masks stay below `MASK_ELEMENTS`; `queries` heads share a key."""
        step = max(8, MASK_ELEMENTS // self._mask_row(queries))
        return [(first, min(first + step, self.n)) for first in range(0, self.n, step)]

    def mask(self, tile: tuple[int, int], end: int, queries: int, dtype: torch.dtype) -> Tensor | None:
        """What the queries of a tile add to their scores of keys 0 ... end - 1."""
        if self.start is not None and self.n == 1:
            return None
        if self._mask is None or self._mask[0] != tile:
            count = tile[1] - tile[0]
            # Kept: the end of a mask that is twice as long at most. A GPU's kernels need aligned rows.
            room = max(256, 1 << (end - 1).bit_length())
            kept = self.positions is None and self.device.type == "cpu" and room >= count
            if kept and queries * count * room <= KEPT_MASK_ELEMENTS:
                self._mask = tile, _causal_mask(queries, count, room, dtype)[..., room - end :]
            else:
                self._mask = tile, self._build_mask(*tile, end).repeat(1, 1, queries, 1).to(dtype)
        return self._mask[1]

    def _build_mask(self, first: int, stop: int, end: int) -> Tensor:
        """[1 or b, 1, stop - first, end]."""
        if self.positions is None:
            return _last_positions_mask(stop - first, end, self.device)
        hidden = torch.arange(end, device=self.device) > self.positions[:, first:stop].unsqueeze(-1)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)


def last_of_rows(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """hidden [b, n, d] -> [b, d] at each row's last token; at the first position for a row without tokens."""
    if len(set(counts)) == 1:
        return hidden[:, max(counts[0] - 1, 0)]
    index = on_device([max(c - 1, 0) for c in counts], hidden.device)
    return hidden[torch.arange(len(hidden), device=hidden.device), index]


def _last_positions_mask(count: int, end: int, device: torch.device) -> Tensor:
    """[1, 1, count, end]: each of the last `count` of `end` positions sees itself and those before it."""
    mask = torch.full((count, end), -torch.inf, device=device)
    return mask.triu_(end - count + 1)[None, None]


@lru_cache(maxsize=8)
def _causal_mask(queries: int, count: int, end: int, dtype: torch.dtype) -> Tensor:
    """`_last_positions_mask` on the CPU for `queries` heads that share a key."""
    with torch.inference_mode(False):
        return _last_positions_mask(count, end, torch.device("cpu")).repeat(1, 1, queries, 1).to(dtype)
