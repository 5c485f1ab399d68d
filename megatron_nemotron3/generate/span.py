"""Which tokens one forward pass gets: n places a row, of which a row may use fewer.

A batch of rows with different lengths lies left-aligned, padding behind:

    row 0   t t t t      lengths 9 -> 13    count 4
    row 1   t t . .      lengths 3 ->  5    count 2

Padding changes nothing: attention looks at earlier places only, a Mamba-2 state gets a time step of zero for
it, which is the identity, and the other layers treat each token alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nemotron3.generate.scan import LONGEST

#: Elements of an attention mask that may exist at once. Beyond it, a CPU takes one row at a time and its
#: `Span.sliding` mask; a GPU, whose kernels want aligned rows of a mask, takes some of the queries at a time.
MASK_ELEMENTS = 2**22


class Span:
    """n places in each of b rows.

    Args:
        lengths: tokens each row has before.
        n: places.
        counts: tokens that each row has among them; default: n.
        keep: whether the states between must stay reachable (`Tape`).

    Raises:
        ValueError: a count that is not in 0 ... n, or not one for each row; more than `scan.LONGEST` places
            to keep.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        n: int,
        counts: Sequence[int] | None,
        device: torch.device,
        keep: bool = False,
    ) -> None:
        if counts is not None and (len(counts) != len(lengths) or not all(0 <= c <= n for c in counts)):
            raise ValueError(
                f"counts {list(counts)} of {len(lengths)} rows: give one for each row, 0 to {n} places"
            )
        if keep and n > LONGEST:
            raise ValueError(f"keep=True with {n} tokens: a pass to go back into has at most {LONGEST}")
        self.b, self.n, self.keep, self.device = len(lengths), n, keep, device
        self.lengths = tuple(lengths)
        self.counts = [n] * self.b if counts is None else list(counts)
        self.longest = max(lengths)
        #: The same for all rows; None: they differ.
        self.start = lengths[0] if min(lengths) == self.longest else None
        #: One token in every row.
        self.single = n == 1 and not keep and min(self.counts) == 1
        self.positions = None
        if self.start is None:
            first = torch.tensor(lengths, device=device).unsqueeze(1)
            self.positions = first + torch.arange(n, device=device)  # [b, n]
            self.rows = torch.arange(self.b, device=device).unsqueeze(1)
        #: [b, n], True for tokens; None: all are.
        self.valid: Tensor | None = None
        if min(self.counts) < n:
            used = torch.tensor(self.counts, device=device).unsqueeze(1)
            self.valid = torch.arange(n, device=device) < used
        self._mask: tuple[tuple[int, int], Tensor] | None = None
        self._window: Tensor | None = None

    @property
    def end(self) -> int:
        """Places of a cache that the longest row fills, padding included."""
        return self.longest + self.n

    def one_mask(self, queries: int) -> bool:
        """Whether the mask of all n places stays below `MASK_ELEMENTS`; `queries` heads share keys."""
        return self.n * self._mask_line(queries) <= MASK_ELEMENTS

    def _mask_line(self, queries: int) -> int:
        """Elements of a mask for one place."""
        return (1 if self.start is not None else self.b) * queries * self.end

    def sliding(self, row: int, dtype: torch.dtype) -> Tensor:
        """The mask of one row's n queries in reverse order, in n + `end` numbers instead of n times `end`.

        Query n - 1 - i misses the last i keys, so line i is line 0 moved by i: windows of one vector.

        Returns:
            [n, lengths[row] + n], 0 or -inf, lines overlapping in memory: to read, not to write.
        """
        if self._window is None or self._window.dtype != dtype:
            self._window = torch.zeros(self.end + self.n - 1, dtype=dtype, device=self.device)
            self._window[self.end :] = -torch.inf
        end = self.lengths[row] + self.n
        return self._window.as_strided((self.n, end), (1, 1), self.end - end)

    def tiles(self, queries: int) -> list[tuple[int, int]]:
        """Ranges of the n places whose masks stay below `MASK_ELEMENTS`, for `queries` heads that share."""
        step = max(8, MASK_ELEMENTS // self._mask_line(queries))
        return [(first, min(first + step, self.n)) for first in range(0, self.n, step)]

    def mask(self, first: int, stop: int, end: int, queries: int, dtype: torch.dtype) -> Tensor | None:
        """What queries at places first ... stop - 1 add to their scores of keys 0 ... end - 1.

        Args:
            queries: heads that share keys; their queries lie behind each other.

        Returns:
            [1 or b, 1, queries * (stop - first), end], 0 or -inf; None: every key is seen. The last one is
            kept, since all attention layers of a pass ask for the same.
        """
        if self.start is not None and self.n == 1:
            return None
        if self._mask is None or self._mask[0] != (first, stop):
            mask = self._make_mask(first, stop, end).repeat(1, 1, queries, 1)
            self._mask = (first, stop), mask.to(dtype)
        return self._mask[1]

    def _make_mask(self, first: int, stop: int, end: int) -> Tensor:
        """[1 or b, 1, stop - first, end]."""
        if self.positions is None:
            mask = torch.full((stop - first, end), -torch.inf, device=self.device)
            return mask.triu_(end - (stop - first) + 1)[None, None]
        hidden = torch.arange(end, device=self.device) > self.positions[:, first:stop].unsqueeze(-1)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)
