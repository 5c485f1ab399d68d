"""Checkpoint tensors as FP32 torch tensors by their Hugging Face names, read a band of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.inventory import WEIGHT_TYPES
from megatron_nemotron3.checkpoints.convert.sources import TensorSource, owned
from megatron_nemotron3.layers.ssd import ssd_chunked
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.definition import Definition

#: Elements read at once: 8 MiB of BF16, which become 16 MiB of FP32.
BAND_ELEMENTS = 4 << 20
#: Queries whose attention scores are in memory at a time.
_QUERIES = 512


@dataclass(frozen=True)
class StoredRows:
    """Rows of a stored tensor of that shape; of one expert where the first axis is that of experts."""

    name: str
    shape: tuple[int, ...]
    first: int
    stop: int
    expert: int | None = None


class TensorReader:
    """The tensors of one checkpoint, which messages call `side`."""

    def __init__(self, side: str, source: TensorSource) -> None:
        self.side, self.source = side, source
        #: Name -> name in the source.
        self.names = {name: name for name in source.tensors}

    def find(self, *names: str) -> str:
        """Return the name in the source of the first of these that exists."""
        for name in names:
            if name in self.names:
                return self.names[name]
        raise ValueError(f"{self.side}: no tensor {' or '.join(names)}")

    def stored(self, name: str) -> list[StoredRows]:
        """Where the rows of a tensor are, in their order."""
        shape = tuple(self.source.tensors[self.find(name)].shape)
        return [StoredRows(self.find(name), shape, 0, shape[0])]

    def bands(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a tensor in order, as FP32.

        Raises:
            ValueError: there is no such tensor, its shape is not the model's, or its dtype is that of packed
                weights.
        """
        for part in self.stored(name):
            self._check_stored(part)
            step = max(1, BAND_ELEMENTS // max(1, prod(self._row(part))))
            for start in range(part.first, part.stop, step):
                yield self._read(part, start, min(start + step, part.stop))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        parts = self.stored(name)
        return sum(part.stop - part.first for part in parts), *self._row(parts[0])

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a tensor of another shape."""
        if (found := self.shape(name)) != tuple(shape):
            raise ValueError(
                f"{self.side}: {name} has shape {list(found)}, its config asks for {list(shape)}"
            )

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a whole tensor, of a shape if one is given. Errors as for `bands`."""
        if shape is not None:
            self.check(name, shape)
        return _joined(self.bands(name), torch.empty(self.shape(name)), 0)

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Read some rows of a table [rows, d], each once. Errors as for `bands`."""
        (table,) = self.stored(name)
        self._check_stored(table)
        read = {row: self._read(table, row, row + 1) for row in sorted(set(rows))}
        return torch.cat([read[row] for row in rows])

    @staticmethod
    def _row(part: StoredRows) -> tuple[int, ...]:
        return part.shape[1:] if part.expert is None else part.shape[2:]

    def _check_stored(self, part: StoredRows) -> None:
        stored = self.source.tensors[part.name]
        if tuple(stored.shape) != part.shape:
            raise ValueError(
                f"{self.side}: {part.name} has shape {list(stored.shape)}, its config asks for "
                f"{list(part.shape)}"
            )
        if stored.dtype not in WEIGHT_TYPES:
            raise ValueError(
                f"{self.side}: {part.name} is {stored.dtype}; weights are read as {', '.join(WEIGHT_TYPES)}"
            )

    def _read(self, part: StoredRows, start: int, stop: int) -> Tensor:
        expert = () if part.expert is None else ((part.expert, part.expert + 1),)
        slices = (*expert, (start, stop), *((0, n) for n in self._row(part)))
        values = owned(self.source.read(part.name, slices), torch.float32)
        return values.reshape(stop - start, *self._row(part))


def _joined(bands: Iterator[Tensor], whole: Tensor, axis: int) -> Tensor:
    """Fill a tensor with bands along an axis; unlike `torch.cat`, no two copies are in memory."""
    start = 0
    for band in bands:
        whole.narrow(axis, start, band.shape[axis]).copy_(band)
        start += band.shape[axis]
    return whole


class StoredDefinition(Definition):
    """The definition on tensors of a checkpoint: a matrix is in memory a band of rows at a time."""

    def __init__(self, config: Nemotron3Config, weights: TensorReader) -> None:
        super().__init__(config, weights.tensor)
        self.weights = weights

    def embed(self, ids: Tensor) -> Tensor:
        found = self.weights.rows(f"{self.root}.embeddings.weight", ids.flatten().tolist())
        return found.view(*ids.shape, -1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x.new_empty(*x.shape[:-1], self.weights.shape(name)[0])
        return _joined(self.products(x, name), y, -1)

    def products(self, x: Tensor, name: str) -> Iterator[Tensor]:
        """The same in bands of outputs."""
        for band in self.weights.bands(name):
            yield x @ band.T

    def vocabulary(self, h: Tensor) -> Iterator[Tensor]:
        """Logits [b, s, n] of one band of the vocabulary after the other."""
        return self.products(h, "lm_head.weight")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, y, start = k.shape[2] - q.shape[2], [], 0
        for part in q.split(_QUERIES, 2):
            start += part.shape[2]
            y.append(super().attend(part, k[:, :, : before + start], v[:, :, : before + start]))
        return torch.cat(y, 2)

    def scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ssm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The fast form, which is exact for states that do not grow."""
        if not ((dt >= 0).all() and (A <= 0).all()):
            return super().scan(x, dt, A, B, C, ssm)
        y, ssm = ssd_chunked(x, dt, A, B, C, initial_state=ssm, return_final_state=True)
        return y, ssm
